"""``closeranks config``: checks and prints a job without starting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

HELP = """Check a job and print it with every default filled in.

\b
  closeranks config job.toml                     the whole job as TOML
  closeranks config job.toml --explain           every value, its origin, its meaning
  closeranks config job.toml train.steps=5       with changes, as `train` would see them
  closeranks config job.toml '~train.epochs'     without a key that the file sets
  closeranks config --schema > job.schema.json   for completion and checks in your editor
"""


def register(app: typer.Typer) -> None:
    app.command("config", help=HELP, short_help="Check a job; print every value and its origin.")(config)


def config(
    job: Annotated[Path | None, typer.Argument(help="The job file.", metavar="JOB.toml")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change; '~table.key' unsets one.", metavar="[TABLE.KEY=VALUE]..."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Each value with its origin and meaning.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of job files.")] = False,
) -> None:
    from closeranks.core.config.explain import explain as explain_lines
    from closeranks.core.config.json_schema import json_schema
    from closeranks.core.config.toml.writer import dump_toml
    from closeranks.core.errors import UserError
    from closeranks.run.job.job import Job, load_job

    if schema:
        typer.echo(json.dumps(json_schema(Job), indent=2))
        return
    if job is None:
        raise UserError("no job file was named", "Write `closeranks config job.toml`, or --schema for the schema.")
    loaded = load_job(job, overrides or [])
    if not explain:
        typer.echo(dump_toml(loaded.value), nl=False)
        return
    rows = explain_lines(loaded)
    width = max(len(f"{row.key} = {row.value}") for row in rows)
    origins = max(len(str(row.origin)) for row in rows)
    for row in rows:
        typer.echo(f"{f'{row.key} = {row.value}':<{min(width, 60)}}  {row.origin!s:<{origins}}  {row.help}".rstrip())

"""``closeranks data show``: shows the n-th sample of a run, or of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from closeranks.cli.terminal import safe_echo

HELP = """Show the sample that a run reads at a position, or the n-th sample of stored data.

\b
  closeranks data show 123                              position 123 of job.toml in this folder
  closeranks data show 123 job.toml run.seed=7          with values changed, as `train` would see them
  closeranks data show 123 shards/                      document or record 123, as it is stored
  closeranks data show 123 shards/ --tokenizer tokenizer.json
  closeranks data show 0 photos/ --save out/            images and other fields as files

Positions count all samples that a run reads, from 0, over all epochs; which sample is there depends on the job
alone, not on the number of workers. Shows the sample's number, its epoch, the step that reads it (counted from 1, as
`train` does), where it is and what it holds: tokens as text where they are bytes or a tokenizer is given, images by
their size, numbers summarised.
"""


def register(app: typer.Typer) -> None:
    app.command("show", help=HELP, short_help="Show the n-th sample of a run, or of stored data.")(show)


def show(
    number: Annotated[int, typer.Argument(min=0, help="Which sample, counted from 0.", metavar="N")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A job or a data set, then values to change.", metavar="[JOB.toml|PATH] [TABLE.KEY=VALUE]..."
        ),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="The tokenizer.json that the tokens were made with.")] = "",
    save: Annotated[Path | None, typer.Option(help="Write the sample's fields into this folder.", metavar="FOLDER")] = (
        None
    ),
    length: Annotated[int, typer.Option(min=1, help="Characters or ids to print of a field.")] = 600,
    format_: Annotated[str, typer.Option("--format", help="Format of PATH, if names do not show it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.cli.data.job_data import parse_arguments
    from closeranks.cli.data.sample_text import decoder_of, lines, sample_of_job, sample_of_path, save_fields

    arguments = parse_arguments(words or [], Path.cwd())
    decode = decoder_of(tokenizer)
    sample = sample_of_job(arguments, number) if arguments.is_job else sample_of_path(arguments, number, format_)
    written = save_fields(sample, save, decode) if save is not None else []
    if as_json:
        print(json.dumps({**sample.as_dict(decode), "files": [str(path) for path in written]}, indent=1))
        return
    for line in lines(sample, decode, length):
        safe_echo(line)
    for path in written:
        safe_echo(f"wrote {path}")

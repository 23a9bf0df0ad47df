"""``closeranks data verify``: checks every block and every record of a data set."""

from __future__ import annotations

from typing import Annotated

import typer

from closeranks.cli.terminal import safe_echo

HELP = """Read all of a data set and name what is damaged: file, block, offset, and the samples it hits.

\b
  closeranks data verify shards/
  closeranks data verify s3://bucket/shards --json
  closeranks data verify photos.tar

Shards: every byte is compared with the checksums written when they were built. Other formats: every record is read, and
compared with the checksums that the format carries, if any, and every image is decoded; the rest can be damaged
without a trace.

Exit status: 0 all is sound, 1 damage was found, 2 it cannot be read, or is not a data set.
"""
_MAX_LISTED = 50


def register(app: typer.Typer) -> None:
    app.command("verify", help=HELP, short_help="Read everything and name what is damaged.")(verify)


def verify(
    path: Annotated[str, typer.Argument(help="A data set: a file, a folder, or a URL of those.", metavar="PATH")],
    format_: Annotated[str, typer.Option("--format", help="Format of PATH, if names do not show it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, for programs.")] = False,
) -> None:
    import json
    import time
    from dataclasses import asdict

    from closeranks.cli.data.dataset_check import check_dataset
    from closeranks.cli.progress_bar import progress

    started_at = time.monotonic()
    with progress("verifying") as on_progress:
        check = check_dataset(path, format_, on_progress)
    seconds = time.monotonic() - started_at
    if as_json:
        print(json.dumps({**asdict(check), "seconds": seconds, "is_sound": not check.findings}, indent=1))
    else:
        for finding in check.findings[:_MAX_LISTED]:
            safe_echo(f"DAMAGED  {finding.text}")
        if len(check.findings) > _MAX_LISTED:
            safe_echo(f"         and {len(check.findings) - _MAX_LISTED:,} more: --json names them all")
        verdict = f"{len(check.findings):,} damaged" if check.findings else "all sound"
        safe_echo(f"{path}: {check.what}: {verdict} ({check.how}, {seconds:.1f} s)")
    if check.findings:
        raise typer.Exit(1)

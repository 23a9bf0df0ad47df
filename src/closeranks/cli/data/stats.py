"""``closeranks data stats``: counts documents or records, tokens, lengths and duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.cli.data.stats_text import NamedStats

HELP = """Count a data set: documents or records, tokens, lengths, exact duplicates, which tokens occur.

\b
  closeranks data stats shards/
  closeranks data stats shards/ --seq-len 2048 --picture lengths.png
  closeranks data stats job.toml                        the data of a job; of a mixture, each part
  closeranks data stats s3://bucket/shards --fast       by the index alone, without reading the content

Lengths are tokens of a document, or bytes of a record; median and p95 are exact up to 65,535 and within one percent
beyond. Duplicates are documents that equal an earlier one to the byte, by a BLAKE3 digest of 128 bits; a record's own
key is not compared. Beyond --limit documents an even sample of contents is kept, which is reported. With --seq-len: how
many samples there are, and how full rows of whole documents become (data.packing = "documents").

Exit status: 0 all was read, 1 some records could not be, 2 nothing to count.
"""


def register(app: typer.Typer) -> None:
    app.command("stats", help=HELP, short_help="Count documents, tokens, lengths and duplicates.")(stats)


def stats(
    place: Annotated[
        str | None, typer.Argument(help="A data set, or a job; without one, job.toml here.", metavar="[PATH|JOB.toml]")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values of the job to change.", metavar="[TABLE.KEY=VALUE]...")
    ] = None,
    seq_len: Annotated[
        int, typer.Option(min=0, help="Tokens per sample, to tell how full packed rows become; 0: the job's.")
    ] = 0,
    picture: Annotated[Path | None, typer.Option(help="Draw the lengths into this PNG.", metavar="OUT.png")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Digests kept to find duplicates, of 16 bytes each.")] = 8 << 20,
    fast: Annotated[
        bool, typer.Option("--fast", help="Count tokens by the index alone: no duplicates, no coverage.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="Format of PATH, if names do not show it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.cli.data.stats_text import StatsOptions, collect_stats
    from closeranks.cli.pictures import check_picture, picture_errors_explained
    from closeranks.cli.progress_bar import progress

    check_picture(picture)
    words = [] if place is None else [place, *(overrides or [])]
    with progress("reading") as on_progress:
        found = collect_stats(words, StatsOptions(seq_len, limit, fast, format_), on_progress)
    if picture is not None:
        from closeranks.cli.data.length_plot import draw_lengths

        with picture_errors_explained(picture):
            draw_lengths(found, picture)
    if as_json:
        print(json.dumps([one.as_dict() for one in found], indent=1))
    else:
        _print_all(found, picture)
    if any(one.stats.num_bad for one in found):
        raise typer.Exit(1)


def _print_all(found: Sequence[NamedStats], picture: Path | None) -> None:
    for number, one in enumerate(found):
        if number:
            safe_echo("")
        _print(one)
    if picture is not None:
        safe_echo(f"\npicture: {picture}")


def _print(found: NamedStats) -> None:
    from closeranks.telemetry.terminal_table import print_table

    safe_echo(f"{found.name}: {found.headline()}")
    for name, value in found.rows():
        safe_echo(f"  {name:<12} {value}")
    bars = found.stats.lengths.bars()
    if bars:
        safe_echo("")
        most = max(bar.count for bar in bars)
        rows = [
            (f"{bar.first:,}", f"{bar.last - 1:,}", f"{bar.count:,}", f"{bar.count / found.stats.lengths.count:.1%}",
             "#" * round(40 * bar.count / most))
            for bar in bars
        ]  # fmt: skip
        headings = (found.unit, "to", found.noun, "share", "")
        print_table(headings, rows, right=headings[:4], droppable=("", "share"))

"""``closeranks data build``: turns raw text and records into shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.data.building.build import BuildReporter, BuildSummary
import re

from closeranks.core.errors import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}{end}": 1000**power for power, letter in enumerate("KMGT", 1) for end in ("", "B")}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_size(text: str, option: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise UserError(f"{option} {text} is not a size", "Write it as 256MB, 64MiB or 1.5GB.")
    num_bytes = int(float(found[1]) * unit)
    if num_bytes < 1:
        raise UserError(f"{option} {text} must be above 0", "Write it as 256MB, 64MiB or 1.5GB.")
    return num_bytes


HELP = """Turn text, JSONL, Parquet, tar, or folders of them into shards that training reads fast and in any order.

\b
  closeranks data build books/ --out shards                          every file a document, every byte a token
  closeranks data build web.jsonl.zst --out shards --tokenizer tokenizer.json --processes 8
  closeranks data build dump.parquet --out shards --field body --eos 0
  closeranks data build corpus.txt --out shards --split line
  closeranks data build photos/ train.tar.gz --out shards --kind records

INPUT is a file, a folder or a URL of those: text, JSONL (also .gz and .zst), Parquet, Arrow and Hugging Face data sets,
tar (also .tar.gz), MDS, TFRecord, image folders. A folder has the format of most of its bytes; others are reported.

Tokens: bytes (a vocabulary of 256) or the tokenizer.json of a Hugging Face model. --eos auto appends the file's
end-of-document token to every document, if it has one; bytes have none. Special tokens that the tokenizer would
put around a text are left out, and texts of more than 4 million characters are encoded in pieces, cut after a line.
Records: all fields as they are; images stay encoded.

The shards are the same to the byte for any number of processes. A build that was killed resumes from its finished
shards when the same command is run again; changed inputs or settings need --overwrite. A record that cannot be used
stops the build and is named; with --on-bad skip it is left out, counted and listed in dataset.json.

Then train on it:   [data]   name = "tokens"   path = "shards"   (or name = "records").
Exit status: 0 built, 1 a process of the build was lost, 2 something needs fixing.
"""


def register(app: typer.Typer) -> None:
    app.command("build", help=HELP, short_help="Turn text, JSONL, Parquet, tar or folders into shards.")(build)


def build(
    inputs: Annotated[list[str], typer.Argument(help="Files, folders or URLs, in this order.", metavar="INPUT...")],
    out: Annotated[str, typer.Option(help="Folder for the shards; new, empty, or from the same build.")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a tokenizer.json.")] = "bytes",
    kind: Annotated[Literal["tokens", "records"], typer.Option(help="What the shards hold.")] = "tokens",
    field: Annotated[
        str, typer.Option(help="For tokens from records: the field with the text. Default: text, content or txt.")
    ] = "",
    eos: Annotated[str, typer.Option(help="End-of-document token: an id, 'auto' or 'none'.")] = "auto",
    split: Annotated[
        Literal["file", "line"], typer.Option(help="A document of a text file: the whole file, or each line.")
    ] = "file",
    shard_size: Annotated[
        str, typer.Option(help="Approximate size of a shard; each is built by one process in one go.")
    ] = "256MB",
    processes: Annotated[int, typer.Option(min=0, help="Processes that build; 0: one per core.")] = 0,
    format_: Annotated[str, typer.Option("--format", help="Format of the inputs, if names do not show it.")] = "",
    on_bad: Annotated[Literal["stop", "skip"], typer.Option(help="What to do with a record that cannot be used.")] = (
        "stop"
    ),
    resume: Annotated[
        bool, typer.Option("--resume/--overwrite", help="Resume an interrupted build, or start over.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.core.errors import DataError
    from closeranks.data.building.build import BuildRequest, build_shards

    if "://" in out or not out.strip():
        raise DataError(f"--out '{out}' is not a folder on this host", "Build into a local folder, and copy it.")
    request = BuildRequest(
        inputs=tuple(inputs),
        out=Path(out).expanduser(),
        tokenizer=tokenizer,
        kind=kind,
        field=field,
        eos=eos,
        split=split,
        shard_bytes=parse_size(shard_size, "--shard-size"),
        num_processes=processes,
        format=format_,
        on_bad=on_bad,
        is_overwriting=not resume,
    )
    with _reporter() as reporter:
        summary = build_shards(request, reporter)
    if as_json:
        print(json.dumps(summary.as_dict(), indent=1))
    else:
        for line in _lines(summary, out):
            safe_echo(line)


def _lines(summary: BuildSummary, out: str) -> Iterator[str]:
    from closeranks.telemetry.terminal_table import size

    if summary.is_old:
        yield f"{out}: built before from the same inputs with the same settings; nothing to do"
    if summary.kind == "records":
        what = _count(summary.num_documents, "record")
    else:
        what = f"{_count(summary.num_documents, 'document')}, {_count(summary.num_tokens, 'token')}"
    shards = _count(summary.num_shards, "shard")
    rate = (
        "" if summary.is_old else f" in {summary.seconds:.1f} s ({summary.read_bytes / summary.seconds / 1e6:.1f} MB/s)"
    )
    resumed = f"; {summary.num_resumed} of {summary.num_parts} parts were done before" if summary.num_resumed else ""
    yield f"{out}: {what} in {shards}, {size(summary.num_bytes)}{rate}{resumed}"
    if summary.num_skipped:
        yield f"{_count(summary.num_skipped, 'record')} skipped:"
        yield from (f"  {one}" for one in summary.skipped)
        if summary.num_skipped > len(summary.skipped):
            yield f"  and {summary.num_skipped - len(summary.skipped):,} more"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def _reporter() -> Iterator[BuildReporter]:
    """Writes remarks to stderr, and a progress bar if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from closeranks.data.building.build import BuildReporter

    console = Console(stderr=True, markup=False, highlight=False)
    columns: tuple[Any, ...] = (TextColumn("building"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)
    with bar:
        task = bar.add_task("building", total=None)
        yield BuildReporter(
            on_total=lambda total, done: bar.update(task, total=total, completed=done),
            on_bytes=lambda num_bytes: bar.update(task, advance=num_bytes),
            on_remark=lambda text: safe_echo(text, err=True),
        )

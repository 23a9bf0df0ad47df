"""Shows the progress and the result of importing or exporting weights.

Draws a bar if stderr is a terminal, and nothing if it is a file or a pipe. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.cli.terminal import safe_echo
from closeranks.core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from closeranks.run.huggingface.convert import HubConversion

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS["TIB"] = 2**40


class TransferBar:
    """One bar for each pass over the bytes (a ``checkpoint.weights.hf_shards.ProgressListener``)."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, stage: str, num_bytes: int) -> None:
        self._task = self._progress.add_task(stage, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)


@contextmanager
def transfer_bar() -> Iterator[TransferBar]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as progress:
        yield TransferBar(progress)


def bytes_of(text: str) -> float:
    """``5GB``, ``500MB`` or ``2GiB`` in bytes; units without an i are decimal, as in Hugging Face's own tools."""
    letters = text.strip().lstrip("0123456789.")
    unit = letters.strip().upper()
    if unit not in _UNITS:
        raise ValueError(f"'{letters}' is no unit of sizes")
    return float(text.strip().removesuffix(letters)) * _UNITS[unit]


def parse_size(text: str) -> int:
    try:
        num_bytes = int(bytes_of(text))
    except ValueError:
        raise UserError(f"--shard-size: '{text}' is not a size", "Write it like 5GB or 500MB.") from None
    if num_bytes < 1:
        raise UserError(f"--shard-size: '{text}' is less than one byte", "Write it like 5GB or 500MB.")
    return num_bytes


def local_path(text: str) -> Path:
    """Where to write; refuses a URL, which ``Path`` would turn into a folder named ``s3:``."""
    if "://" in text and not text.startswith("file://"):
        raise UserError(f"{text} is not a local path", "Write to a local folder, and copy it from there.")
    return Path(text.removeprefix("file://"))


def size_text(num_bytes: int) -> str:
    for unit in ("TB", "GB", "MB", "kB"):
        size = _UNITS[unit.upper()]
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def print_result(conversion: HubConversion, last: str) -> None:
    """Print the notes, where the result is, and what to do with it."""
    for note in conversion.notes:
        safe_echo(f"note: {note}", err=True)
    files = f" in {len(conversion.files)} files" if len(conversion.files) > 1 else ""
    size = size_text(conversion.num_bytes)
    safe_echo(f"{conversion.source} -> {conversion.place}: {conversion.num_tensors} tensors, {size}{files}.\n{last}")

"""Writes a folder atomically: it appears complete or not at all.

It is filled under another name beside its own and renamed when it is complete. Invariants: existing files at the target
are never touched; an error or Ctrl-C while it is filled leaves nothing behind. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from closeranks.core.errors import SetupError


@contextmanager
def atomic_folder(place: Path) -> Iterator[Path]:
    """A folder to fill; it is renamed to ``place`` if the block ends without an error."""
    refuse_existing(place)
    place = place.absolute()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.unfinished")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync(temporary)
        temporary.rename(place)
        _sync(place.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        fix = "Name a place that you can write to and that has room."
        raise SetupError(f"{place} cannot be written: {reason}", fix) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(place: Path) -> None:
    """Checked before hours of work: only an empty or missing folder may be filled."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise SetupError(f"{place} already exists and is not overwritten", "Choose another path, or remove it first.")


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

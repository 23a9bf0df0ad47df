"""Checks that a picture can be written to the path that the user named.

Invariant: a path that cannot be written is reported in one sentence, if possible before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from closeranks.core.errors import SetupError


def check_picture(picture: Path | None) -> None:
    """Called before anything is read, since counting may take an hour."""
    if picture is None:
        return
    if not picture.parent.is_dir():
        raise SetupError(f"there is no folder {picture.parent} to draw into", "Make it, or name another.")
    if picture.suffix.lower() != ".png":
        raise SetupError(f"{picture} does not end in .png", "Pictures are drawn as PNG.")


@contextmanager
def picture_errors_explained(picture: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"{picture} cannot be written: {error.strerror or error}", "Name another place.") from error

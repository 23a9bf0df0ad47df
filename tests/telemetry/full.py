"""A disk that is full, for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")


def fill(place: Path) -> Path:
    """No byte is left; remove what is returned to make room."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return filler

"""Reads the small files of /proc and of control groups. One that is missing, or that we may not read, is empty."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def text_of(path: str | Path) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def numbers_of(path: str | Path) -> dict[str, float]:
    """``name: 12 kB`` and ``name 12`` as ``{"name": 12}``; lines without a number are left out."""
    return dict(_numbers(text_of(path)))


def _numbers(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, *values = line.replace(":", " ").split() or [""]
        if values and values[0].lstrip("-").isdecimal():
            yield name, int(values[0])

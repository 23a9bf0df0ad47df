"""Which cached files go first when room is needed?

Pure: from what lies in the cache to an order. Files carry what is needed on themselves, in their time stamps: the time
of modification is when one was last used or fetched, the time of access is 0 from when a file was fetched ahead until
it is first used. Invariants: of what was used, that used longest ago goes first; what is about to be used goes last, of
that what is needed latest first; and what is fetched ahead never drives out what is needed sooner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

AHEAD_S = 600.0
"""A file that was fetched ahead and not used for so long was the wish of a process that is gone."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file in the cache."""

    name: str
    num_bytes: int
    stamped_at: float
    was_used: bool
    """Since it was last fetched or wished for."""


def cached_file(name: str, stat: os.stat_result) -> CachedFile:
    return CachedFile(name, stat.st_size, stat.st_mtime, stat.st_atime > 0)


def eviction_order(
    files: Iterable[CachedFile], wanted: Collection[str], now: float, *, is_ahead: bool
) -> list[CachedFile]:
    """The order in which files make room, for one that is needed now or is fetched ahead. ``wanted``: names that the
    asking process will need. Other processes' wishes are known by their stamps alone."""
    used: list[CachedFile] = []
    wished: list[CachedFile] = []
    for file in files:
        is_wished = file.name in wanted or (not file.was_used and now - file.stamped_at < AHEAD_S)
        (wished if is_wished else used).append(file)
    used.sort(key=lambda file: file.stamped_at)
    if is_ahead:
        return used
    # Fetched in the order of need: the youngest is needed latest.
    return used + sorted(wished, key=lambda file: file.stamped_at, reverse=True)


def mark_used(fd: int) -> None:
    _stamp(fd, is_used=True)


def mark_prefetched(fd: int) -> None:
    _stamp(fd, is_used=False)


def _stamp(fd: int, *, is_used: bool) -> None:
    try:
        now = time.time_ns()
        os.utime(fd, ns=(now if is_used else 0, now))
    except PermissionError:
        return  # another user's file in a shared cache: it keeps that user's stamps

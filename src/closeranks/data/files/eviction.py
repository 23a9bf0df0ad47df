"""Decides which cached files are evicted first.

Pure: a function from the contents of the cache to an order. All state is in the files' time stamps: the time of
modification is when a file was last used or fetched; the time of access is 0 from when a file is prefetched until its
first use. Invariants: of the files that were used, the least recently used is evicted first; files that are about to be
used are evicted last, and of those the one needed latest goes first; a prefetched file never evicts one that is needed
sooner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PREFETCH_TTL_S = 600.0
"""A file that was prefetched and not used for this long was requested by a process that is gone."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file in the cache."""

    name: str
    num_bytes: int
    stamped_at: float
    was_used: bool
    """Since it was last fetched or requested."""


def cached_file(name: str, stat: os.stat_result) -> CachedFile:
    return CachedFile(name, stat.st_size, stat.st_mtime, stat.st_atime > 0)


def eviction_order(
    files: Iterable[CachedFile], wanted: Collection[str], now: float, *, is_prefetch: bool
) -> list[CachedFile]:
    """The order in which files are evicted for one that is needed now, or for one that is prefetched. ``wanted``: names
    that the requesting process will need. What other processes need is known from the time stamps alone."""
    used: list[CachedFile] = []
    needed: list[CachedFile] = []
    for file in files:
        is_needed = file.name in wanted or (not file.was_used and now - file.stamped_at < PREFETCH_TTL_S)
        (needed if is_needed else used).append(file)
    used.sort(key=lambda file: file.stamped_at)
    if is_prefetch:
        return used
    # Files are prefetched in the order of need: the youngest is needed latest.
    return used + sorted(needed, key=lambda file: file.stamped_at, reverse=True)


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

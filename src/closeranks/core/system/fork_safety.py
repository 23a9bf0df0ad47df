"""Keeps memory and sockets of a run out of forked children of the user's code.

A fork copies every descriptor and every mapping. A child that outlives its worker (a daemon that calls ``setsid``)
would hold copies of the training state and connections to other ranks for as long as it lives. Programs that are
started with ``subprocess`` inherit neither: everything here is close-on-exec. Invariant: after ``close_in_children`` a
forked child has none of them; their descriptor numbers stay in use, by /dev/null, so that closing one of them later in
the child closes nothing else.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MEMORY = "/memfd:closeranks-"


class _Tracked:
    sockets: set[tuple[int, str]]
    is_registered = False


_Tracked.sockets = set()


def exclude_from_fork(memory: mmap.mmap) -> mmap.mmap:
    """The same mapping, excluded from forks: a child that touched it would crash, and none of ours does."""
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


@contextmanager
def track_sockets() -> Iterator[None]:
    """Sockets opened inside, by any library, are treated as the run's."""
    before = set(_open_files())
    try:
        yield
    finally:
        for fd, target in set(_open_files()) - before:
            if target.startswith("socket:"):
                os.set_inheritable(fd, False)
                _Tracked.sockets.add((fd, target))


def exclude_socket_from_fork(fd: int) -> None:
    """The same for one socket that is open already."""
    os.set_inheritable(fd, False)
    _Tracked.sockets.add((fd, os.readlink(f"/proc/self/fd/{fd}")))


def close_in_children() -> None:
    """Close them in every child that this process forks from now on. May be called again."""
    if not _Tracked.is_registered:
        _Tracked.is_registered = True
        os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd, target in _open_files():
        if target.startswith(_MEMORY) or (fd, target) in _Tracked.sockets:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _open_files() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            yield int(name), os.readlink(f"/proc/self/fd/{name}")

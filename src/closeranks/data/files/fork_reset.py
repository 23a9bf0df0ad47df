"""What must a forked child forget?

Threads do not come along, a lock that one of them held stays shut for ever, and a connection has two users. Invariant:
in the child, everything that was ``registered`` and is still in use has had its ``forget`` called before any other line
of the child runs.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkResettable(Protocol):
    def reset_after_fork(self) -> None:
        """Begin anew, as if nothing had been opened; touches nothing that the parent still uses."""
        ...


_KNOWN: WeakSet[ForkResettable] = WeakSet()


def register_fork_reset(thing: ForkResettable) -> None:
    _KNOWN.add(thing)


def _forget_all() -> None:
    for thing in tuple(_KNOWN):
        thing.reset_after_fork()


os.register_at_fork(after_in_child=_forget_all)

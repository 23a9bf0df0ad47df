"""Resets objects in a forked child that cannot be shared with the parent.

Threads do not exist in the child, a lock that one of them held stays locked forever, and a connection would have two
users. Invariant: in the child, ``reset_after_fork`` of every live object that was passed to ``register_fork_reset`` has
been called before any other line of the child runs.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkResettable(Protocol):
    def reset_after_fork(self) -> None:
        """Return to the state before anything was opened; touches nothing that the parent still uses."""
        ...


_REGISTERED: WeakSet[ForkResettable] = WeakSet()


def register_fork_reset(obj: ForkResettable) -> None:
    _REGISTERED.add(obj)


def _reset_all() -> None:
    for obj in tuple(_REGISTERED):
        obj.reset_after_fork()


os.register_at_fork(after_in_child=_reset_all)

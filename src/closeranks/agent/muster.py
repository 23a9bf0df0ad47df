"""The notice that a job waits for hosts before it begins.

Invariant: the user is told which hosts are missing and how they can join, at once and then every ``EVERY_S``.
"""

from __future__ import annotations

from collections.abc import Sequence

EVERY_S = 10.0


class HostWaitNotice:
    """Counts hosts until there are enough. ``how``: the command by which another one joins."""

    def __init__(self, num_hosts: int, how: str) -> None:
        self._num_hosts = num_hosts
        self._how = how
        self._next_at = 0.0
        self._told: tuple[str, ...] | None = None

    def check(self, here: Sequence[str], now: float) -> tuple[str, float | None]:
        """The notice to show now, usually empty, and when to check again; ``here``: the hosts that have joined."""
        num_missing = self._num_hosts - len(here)
        if num_missing <= 0:
            return "", None
        if now < self._next_at and self._told == tuple(here):
            return "", self._next_at
        self._told, self._next_at = tuple(here), now + EVERY_S
        whom = "another host" if num_missing == 1 else f"{num_missing} more hosts"
        present = f"; here: {', '.join(here)}" if here else ""
        return f"Waiting for {whom} of {self._num_hosts}{present}. On each: {self._how}", self._next_at

"""The table of hosts that the restart policy chooses from.

Invariant: hosts are in the order in which they first joined, the leader's own first, so that a host which rejoins gets
its old ranks again; one that has left is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from closeranks.agent.job.placement import HostState
from closeranks.agent.job_view import HostView
from closeranks.agent.membership.effects import HostStatusChanged

NOTICE_INTERVAL_S = 10.0


class HostWaitNotice:
    """Counts hosts until there are enough. ``join_command``: the command by which another one joins."""

    def __init__(self, num_hosts: int, join_command: str) -> None:
        self._num_hosts = num_hosts
        self._join_command = join_command
        self._next_at = 0.0
        self._shown: tuple[str, ...] | None = None

    def check(self, joined: Sequence[str], now: float) -> tuple[str, float | None]:
        """The notice to show now, usually empty, and when to check again; ``joined``: the hosts that have joined."""
        num_missing = self._num_hosts - len(joined)
        if num_missing <= 0:
            return "", None
        if now < self._next_at and self._shown == tuple(joined):
            return "", self._next_at
        self._shown, self._next_at = tuple(joined), now + NOTICE_INTERVAL_S
        missing = "another host" if num_missing == 1 else f"{num_missing} more hosts"
        present = f"; joined: {', '.join(joined)}" if joined else ""
        text = f"Waiting for {missing} ({self._num_hosts} in all{present}). Run on each: {self._join_command}"
        return text, self._next_at


class HostTable:
    def __init__(self, leader: str) -> None:
        self._leader = leader
        self._hosts: dict[str, HostState] = {}

    def update(self, changed: HostStatusChanged, now: float) -> None:
        """A host joined, is leaving, left or was lost."""
        known = self._hosts.get(changed.host)
        match changed.change:
            case "joined":
                is_leader = changed.host == self._leader
                self._hosts[changed.host] = HostState(changed.host, changed.num_workers, is_leader, "ready", now)
            case "left":
                self._hosts.pop(changed.host, None)
            case "leaving" | "lost" as state if known is not None:
                self._hosts[changed.host] = replace(known, state=state, since=now)

    @property
    def hosts(self) -> list[HostState]:
        return sorted(self._hosts.values(), key=lambda host: not host.is_leader)

    @property
    def is_leader_ready(self) -> bool:
        """Whether the leader's own host can take workers: no generation begins without it."""
        return any(host.is_leader and host.state == "ready" for host in self._hosts.values())

    @property
    def num_ready(self) -> int:
        return sum(host.state == "ready" for host in self._hosts.values())

    @property
    def capacity(self) -> int:
        """How many workers could be started now."""
        return sum(host.num_workers for host in self._hosts.values() if host.state == "ready")

    def host_views(self, members: frozenset[str], quarantined: frozenset[str]) -> tuple[HostView, ...]:
        return tuple(
            HostView(host.name, host.num_workers, _state(host, members, quarantined)) for host in self._hosts.values()
        )


def _state(host: HostState, members: frozenset[str], quarantined: frozenset[str]) -> str:
    if host.state != "ready":
        return host.state
    if host.name in members:
        return "member"
    return "quarantined" if host.name in quarantined else "ready"

"""The sessions of the hosts that the leader knows, and when each session's lease expires.

Invariant: a lost session never comes back; the host returns with a new session. The workers of a session count as dead
only when its lease has expired on the leader's clock, or when the host is known to have killed them earlier.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.agent.membership.messages import Envelope, MessageBody, RankProgress


@dataclass(slots=True, eq=False)
class HostSession:
    """One session of one host, as the leader knows it."""

    name: str
    incarnation: int
    session: int
    num_workers: int
    expires_at: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_confirmed: bool = False
    """The host has answered the welcome, so messages pass in both directions: it may become a member."""
    is_leaving: bool = False
    is_lost: bool = False
    gone_at: float = math.inf
    """When its workers are dead for a reason other than the expiry of its lease."""
    progress: tuple[RankProgress, ...] = ()

    @property
    def identity(self) -> tuple[int, int]:
        return self.incarnation, self.session

    @property
    def dead_at(self) -> float:
        """When none of its workers is alive any more, if no further heartbeat arrives."""
        return min(self.gone_at, self.expires_at)

    def envelope(self, term: int, body: MessageBody) -> Envelope:
        return Envelope(term, self.name, self.incarnation, self.session, body)


class HostSessions:
    """The newest session of every host, with an expiry time for each. Every operation costs O(log hosts) at most."""

    def __init__(self) -> None:
        self._by_name: dict[str, HostSession] = {}
        self._alarms: list[tuple[float, int, HostSession]] = []
        self._num_alarms = 0
        self.num_here = 0

    def get(self, name: str) -> HostSession | None:
        return self._by_name.get(name)

    def add(self, peer: HostSession) -> None:
        """Replaces the host's earlier session, which must be lost by now."""
        self._by_name.pop(peer.name, None)
        self._by_name[peer.name] = peer
        self.num_here += 1
        self._alarm(peer)

    def mark_lost(self, peer: HostSession, dead_at: float = math.inf) -> None:
        """Mark the session as lost. Its workers may live until its lease expires, or until ``dead_at`` if that is
        earlier."""
        if not peer.is_lost:
            peer.is_lost = True
            self.num_here -= 1
        if dead_at < peer.dead_at:
            peer.gone_at = dead_at
            self._alarm(peer)

    def present(self) -> Iterator[HostSession]:
        """The sessions that are not lost, in the order in which they joined."""
        return (peer for peer in self._by_name.values() if not peer.is_lost)

    def expired(self, now: float) -> list[HostSession]:
        """The sessions whose workers are dead by now. A timer that heartbeats have postponed is set again, once per
        lease."""
        dead = []
        while self._alarms and self._alarms[0][0] <= now:
            peer = heapq.heappop(self._alarms)[2]
            if peer.dead_at <= now:
                dead.append(peer)
            else:
                self._alarm(peer)
        return dead

    def next_expiry(self) -> float | None:
        return self._alarms[0][0] if self._alarms else None

    def _alarm(self, peer: HostSession) -> None:
        self._num_alarms += 1
        heapq.heappush(self._alarms, (peer.dead_at, self._num_alarms, peer))

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
        self._expiries: list[tuple[float, int, HostSession]] = []
        self._num_pushed = 0
        self.num_present = 0

    def get(self, name: str) -> HostSession | None:
        return self._by_name.get(name)

    def add(self, session: HostSession) -> None:
        """Replaces the host's earlier session, which must be lost by now."""
        self._by_name.pop(session.name, None)
        self._by_name[session.name] = session
        self.num_present += 1
        self._push_expiry(session)

    def mark_lost(self, session: HostSession, dead_at: float = math.inf) -> None:
        """Mark the session as lost. Its workers may live until its lease expires, or until ``dead_at`` if that is
        earlier."""
        if not session.is_lost:
            session.is_lost = True
            self.num_present -= 1
        if dead_at < session.dead_at:
            session.gone_at = dead_at
            self._push_expiry(session)

    def present(self) -> Iterator[HostSession]:
        """The sessions that are not lost, in the order in which they joined."""
        return (session for session in self._by_name.values() if not session.is_lost)

    def expired(self, now: float) -> list[HostSession]:
        """The sessions whose workers are dead by now. A timer that heartbeats have postponed is set again, once per
        lease."""
        dead = []
        while self._expiries and self._expiries[0][0] <= now:
            session = heapq.heappop(self._expiries)[2]
            if session.dead_at <= now:
                dead.append(session)
            else:
                self._push_expiry(session)
        return dead

    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def _push_expiry(self, session: HostSession) -> None:
        self._num_pushed += 1
        heapq.heappush(self._expiries, (session.dead_at, self._num_pushed, session))

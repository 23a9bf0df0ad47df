"""Which hosts does the lead know, and until when does it trust each to be alive?

Invariant: a peer is one session of a host; once lost it is never found again, the host comes back as another peer. Its
workers count as dead only when its lease has expired on the lead's clock, or it is known to have killed them earlier.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.agent.membership.messages import Body, Letter, RankProgress


@dataclass(slots=True, eq=False)
class Peer:
    """One session of one host, as the lead knows it."""

    name: str
    incarnation: int
    session: int
    num_workers: int
    expires_at: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_heard: bool = False
    """It has answered the welcome, so both ways are open: it may become a member."""
    is_leaving: bool = False
    is_lost: bool = False
    gone_at: float = math.inf
    """When its workers are dead for another reason than its lease."""
    progress: tuple[RankProgress, ...] = ()

    @property
    def identity(self) -> tuple[int, int]:
        return self.incarnation, self.session

    @property
    def dead_at(self) -> float:
        """When none of its workers lives any more, if it is never heard again."""
        return min(self.gone_at, self.expires_at)

    def letter(self, term: int, body: Body) -> Letter:
        return Letter(term, self.name, self.incarnation, self.session, body)


class Peers:
    """All hosts of the lead, with a clock on each. Every operation costs O(log hosts) at most."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer] = {}
        self._alarms: list[tuple[float, int, Peer]] = []
        self._num_alarms = 0
        self.num_here = 0

    def get(self, name: str) -> Peer | None:
        return self._by_name.get(name)

    def add(self, peer: Peer) -> None:
        """In the place of the host's earlier peer, which must be lost by now."""
        self._by_name.pop(peer.name, None)
        self._by_name[peer.name] = peer
        self.num_here += 1
        self._alarm(peer)

    def lose(self, peer: Peer, dead_at: float = math.inf) -> None:
        """It will not be heard any more. Its lease runs on for its workers, unless they die earlier."""
        if not peer.is_lost:
            peer.is_lost = True
            self.num_here -= 1
        if dead_at < peer.dead_at:
            peer.gone_at = dead_at
            self._alarm(peer)

    def here(self) -> Iterator[Peer]:
        """In the order of their joining."""
        return (peer for peer in self._by_name.values() if not peer.is_lost)

    def due(self, now: float) -> list[Peer]:
        """Those whose workers are dead by now. An alarm that a beat has put off is set anew, once a lease."""
        dead = []
        while self._alarms and self._alarms[0][0] <= now:
            peer = heapq.heappop(self._alarms)[2]
            if peer.dead_at <= now:
                dead.append(peer)
            else:
                self._alarm(peer)
        return dead

    def next_alarm(self) -> float | None:
        return self._alarms[0][0] if self._alarms else None

    def _alarm(self, peer: Peer) -> None:
        self._num_alarms += 1
        heapq.heappush(self._alarms, (peer.dead_at, self._num_alarms, peer))

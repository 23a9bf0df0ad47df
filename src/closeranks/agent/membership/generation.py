"""The state of one generation and of each of its members.

    forming --all have started--> running --fault, loss or order--> breaking --every member is out--> settled
                                     `------- every member is done --------------------------------------^

Invariant: a generation is settled only when every member is done or out, that is, when none of its workers is alive and
none can be started. Counts are updated, not recomputed: a message costs the same in a fleet of ten thousand hosts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.agent.membership.effects import Cause
from closeranks.agent.membership.messages import Ask, Begin
from closeranks.agent.membership.peers import Peer


class Phase(enum.StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    BREAKING = "breaking"
    SETTLED = "settled"


class Standing(enum.IntEnum):
    CALLED = 0
    """Ordered to start its workers."""
    WORKING = 1
    DONE = 2
    """Its workers have exited by themselves."""
    OUT = 3
    """Its workers are dead, or the host is."""


@dataclass(slots=True, eq=False)
class Seat:
    """One host as a member of a generation."""

    peer: Peer
    begin: Begin
    told_at: float
    """When an order that it has not confirmed yet was last sent to it."""
    standing: Standing = Standing.CALLED
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether some of its workers may be alive."""
        return self.standing < Standing.DONE


class Generation:
    """The members of one generation, and their states."""

    def __init__(self, number: int, seats: list[Seat]) -> None:
        self.number = number
        self.phase = Phase.FORMING
        self.seats = {seat.peer.name: seat for seat in seats}
        self.cause = Cause("done")
        self.store = ""
        self.asks: list[Ask] = []
        self._num = dict.fromkeys(Standing, 0)
        self._num[Standing.CALLED] = len(seats)

    def seat_of(self, peer: Peer) -> Seat | None:
        """None if the member is another session of that host."""
        seat = self.seats.get(peer.name)
        return seat if seat is not None and seat.peer is peer else None

    def move(self, seat: Seat, standing: Standing) -> None:
        """States only move forward: a late report of an earlier state changes nothing."""
        if standing > seat.standing:
            self._num[seat.standing] -= 1
            self._num[standing] += 1
            seat.standing = standing

    @property
    def is_alive(self) -> bool:
        return self.phase in (Phase.FORMING, Phase.RUNNING)

    @property
    def has_started(self) -> bool:
        return not self._num[Standing.CALLED]

    @property
    def is_empty(self) -> bool:
        return not self._num[Standing.CALLED] and not self._num[Standing.WORKING]

    def open_seats(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.is_open]

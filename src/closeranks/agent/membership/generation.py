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

from closeranks.agent.membership.effects import EndCause
from closeranks.agent.membership.host_sessions import HostSession
from closeranks.agent.membership.messages import BeginGeneration, WorkerRequest


class GenerationPhase(enum.StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    BREAKING = "breaking"
    SETTLED = "settled"


class MemberState(enum.IntEnum):
    ORDERED = 0
    """Ordered to start its workers."""
    WORKING = 1
    DONE = 2
    """Its workers have exited by themselves."""
    OUT = 3
    """Its workers are dead, or the host is."""


@dataclass(slots=True, eq=False)
class GenerationMember:
    """One host as a member of a generation."""

    session: HostSession
    begin: BeginGeneration
    ordered_at: float
    """When an order that it has not confirmed yet was last sent to it."""
    state: MemberState = MemberState.ORDERED
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_have_workers(self) -> bool:
        """Whether some of its workers may be alive."""
        return self.state < MemberState.DONE


class Generation:
    """The members of one generation, and their states."""

    def __init__(self, number: int, members: list[GenerationMember]) -> None:
        self.number = number
        self.phase = GenerationPhase.FORMING
        self.members = {member.session.name: member for member in members}
        self.cause = EndCause("done")
        self.store = ""
        self.requests: list[WorkerRequest] = []
        self._num = dict.fromkeys(MemberState, 0)
        self._num[MemberState.ORDERED] = len(members)

    def member_of(self, session: HostSession) -> GenerationMember | None:
        """None if the member is another session of that host."""
        member = self.members.get(session.name)
        return member if member is not None and member.session is session else None

    def move(self, member: GenerationMember, state: MemberState) -> None:
        """States only move forward: a late report of an earlier state changes nothing."""
        if state > member.state:
            self._num[member.state] -= 1
            self._num[state] += 1
            member.state = state

    @property
    def is_alive(self) -> bool:
        return self.phase in (GenerationPhase.FORMING, GenerationPhase.RUNNING)

    @property
    def has_started(self) -> bool:
        return not self._num[MemberState.ORDERED]

    @property
    def is_empty(self) -> bool:
        return not self._num[MemberState.ORDERED] and not self._num[MemberState.WORKING]

    def live_members(self) -> list[GenerationMember]:
        return [member for member in self.members.values() if member.may_have_workers]

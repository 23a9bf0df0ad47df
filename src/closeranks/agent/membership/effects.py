"""Effects that the membership state machines return: they decide, their caller acts.

Invariant: effects are carried out in the order in which they were returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from closeranks.agent.membership.messages import (
    BeginGeneration,
    Envelope,
    HostNote,
    WorkerEvent,
    WorkerOutput,
    WorkerRequest,
)

Why = Literal["done", "fault", "lost", "rejoined", "restarted", "ordered"]
HostChange = Literal["joined", "leaving", "left", "lost"]


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message: to the host that the envelope names or, on a host, to the leader."""

    envelope: Envelope


# --- effects of the leader


@dataclass(frozen=True, slots=True)
class AvailableHost:
    """A host that could take workers now."""

    name: str
    num_workers: int
    """Its capacity."""
    incarnation: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndCause:
    """Why a generation ended."""

    why: Why
    host: str = ""
    what: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostStatusChanged:
    """A host joined, is leaving, left or was lost."""

    host: str
    change: HostChange
    what: str = ""
    num_workers: int = 0


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """Every member has started its workers."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationBroken:
    """The generation is being fenced; ``cause`` is the first one."""

    generation: int
    cause: EndCause


@dataclass(frozen=True, slots=True)
class GenerationSettled:
    """No worker of the generation is alive any more: the next generation may begin, on any of the available hosts."""

    generation: int
    cause: EndCause
    facts: Mapping[str, Mapping[str, Any]]
    """What each member reported when it was done or fenced; lost members have no entry."""
    available: tuple[AvailableHost, ...]


@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """An event, output line or note that a member passed on."""

    host: str
    body: WorkerEvent | WorkerOutput | HostNote


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """This leader's own lease has expired: it gives no more orders."""

    term: int


LeaderEffect = (
    SendMessage
    | HostStatusChanged
    | GenerationFormed
    | GenerationBroken
    | GenerationSettled
    | RelayedMessage
    | SteppedDown
)


# --- effects of a host


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    """The leader has accepted this host; ``plan`` describes the job."""

    term: int
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Fork the workers of a generation."""

    begin: BeginGeneration


@dataclass(frozen=True, slots=True)
class ForwardStore:
    """Pass the store's address to the workers, for their rendezvous."""

    address: str


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Pass a request on to the workers."""

    request: WorkerRequest


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """Send SIGKILL to every worker at once; when they are dead, call ``Follower.on_fenced``."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class ParticipationEnded:
    """The job is over for this host, and none of its workers is alive. ``is_lost``: no leader is left. With ``is_lost``
    or ``rescues``, the snapshots in memory must be written to disk first."""

    reason: str
    is_lost: bool = False
    rescues: bool = False


FollowerEffect = (
    SendMessage | JoinAccepted | StartWorkers | ForwardStore | ForwardRequest | KillWorkers | ParticipationEnded
)

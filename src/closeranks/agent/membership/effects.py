"""Effects that the membership state machines return: they decide, their caller acts.

Invariant: effects are carried out in the order in which they were returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from closeranks.agent.membership.messages import Ask, Begin, Event, Letter, Note, Output

Why = Literal["done", "fault", "lost", "rejoined", "restarted", "ordered"]
Change = Literal["joined", "leaving", "left", "lost"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message: to the host that the envelope names or, on a host, to the leader."""

    letter: Letter


# --- effects of the leader


@dataclass(frozen=True, slots=True)
class Host:
    """A host that could take workers now."""

    name: str
    num_workers: int
    """Its capacity."""
    incarnation: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a generation ended."""

    why: Why
    host: str = ""
    what: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changed:
    """A host joined, is leaving, left or was lost."""

    host: str
    change: Change
    what: str = ""
    num_workers: int = 0


@dataclass(frozen=True, slots=True)
class Formed:
    """Every member has started its workers."""

    generation: int


@dataclass(frozen=True, slots=True)
class Broke:
    """The generation is being fenced; ``cause`` is the first one."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Settled:
    """No worker of the generation is alive any more: the next generation may begin, on any of the available hosts."""

    generation: int
    cause: Cause
    facts: Mapping[str, Mapping[str, Any]]
    """What each member reported when it was done or fenced; lost members have no entry."""
    available: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """An event, output line or note that a member passed on."""

    host: str
    body: Event | Output | Note


@dataclass(frozen=True, slots=True)
class Deposed:
    """This leader's own lease has expired: it gives no more orders."""

    term: int


LeadEffect = Send | Changed | Formed | Broke | Settled | Told | Deposed


# --- effects of a host


@dataclass(frozen=True, slots=True)
class Joined:
    """The leader has accepted this host; ``plan`` describes the job."""

    term: int
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Fork the workers of a generation."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class TakeStore:
    """Pass the store's address to the workers, for their rendezvous."""

    address: str


@dataclass(frozen=True, slots=True)
class TakeAsk:
    """Pass a request on to the workers."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to every worker at once; when they are dead, call ``Follower.fenced``."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over for this host, and none of its workers is alive. ``is_lost``: no leader is left. With ``is_lost``
    or ``rescues``, the snapshots in memory must be written to disk first."""

    reason: str
    is_lost: bool = False
    rescues: bool = False


FollowerEffect = Send | Joined | Start | TakeStore | TakeAsk | Kill | End

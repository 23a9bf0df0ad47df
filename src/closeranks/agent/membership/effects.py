"""What do the machines of the membership want done? They decide; whoever runs them acts.

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
    """To the host that the letter names, or, on a host, to the lead."""

    letter: Letter


# --- the lead's


@dataclass(frozen=True, slots=True)
class Host:
    """A host that could take workers now."""

    name: str
    num_workers: int
    """How many it has room for."""
    incarnation: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a generation is over."""

    why: Why
    host: str = ""
    what: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changed:
    """A host came or went."""

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
    """The generation is being fenced; the first cause counts."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Settled:
    """No worker of the generation lives any more: the next one may begin, with any of these hosts."""

    generation: int
    cause: Cause
    facts: Mapping[str, Mapping[str, Any]]
    """What each member told when it was done or fenced; nothing of those that were lost."""
    available: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """A member passes on what its workers said."""

    host: str
    body: Event | Output | Note


@dataclass(frozen=True, slots=True)
class Deposed:
    """This lead's authority has run out: it orders nothing any more."""

    term: int


LeadEffect = Send | Changed | Formed | Broke | Settled | Told | Deposed


# --- a host's


@dataclass(frozen=True, slots=True)
class Joined:
    """The lead knows this host; ``plan`` is what it said of the job."""

    term: int
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Fork the workers of a generation."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class TakeStore:
    """Tell the workers where their group forms."""

    address: str


@dataclass(frozen=True, slots=True)
class TakeAsk:
    """Pass a request on to the workers."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to every worker, at once; then tell ``Follower.fenced``."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """It is over for this host, and no worker of it lives. ``is_lost``: no lead is left. ``rescues``, and then too:
    what memory holds belongs on disk first."""

    reason: str
    is_lost: bool = False
    rescues: bool = False


FollowerEffect = Send | Joined | Start | TakeStore | TakeAsk | Kill | End

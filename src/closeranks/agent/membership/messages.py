"""What do the agent of a host and the lead's agent say to each other?

    host -> lead   Join Beat Store Broken Fenced Done Leaving Event Output Note
    lead -> host   Welcome BeatBack Begin Store Ask Fence Dismiss

A message is a ``Letter``: to or from which host (name, incarnation, session), in which term, and a body. An
``incarnation`` is one life of a host's agent, and of the memory it keeps; a ``session`` is one joining of it. A term
names a lead: no two leads share one. Invariant: ``from_fields`` takes what ``to_fields`` gave and refuses everything
else with a ``ProtocolError``; a letter that was decoded has no value that its reader must doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, get_type_hints

from closeranks.agent.membership.checks import Check, Flag, Kind, Number, ProtocolError, Runs, Table, Text, Whole
from closeranks.agent.progress import Phase as _Phase
from closeranks.core.requests import Request

Fields = dict[str, Any]

_MAX_WORKERS_PER_HOST = 4096
_LONGEST_LINE = 1 << 20

Count = Annotated[int, Whole()]
Ordinal = Annotated[int, Whole(1)]
CountOrNone = Annotated[int, Whole(-1)]
"""-1 stands for none yet."""
Room = Annotated[int, Whole(1, _MAX_WORKERS_PER_HOST)]
Phase = Annotated[int, Whole(0, len(_Phase) - 1)]
Seconds = Annotated[float, Number()]
Pause = Annotated[float, Number(0.001, 3600.0)]
YesNo = Annotated[bool, Flag()]
Words = Annotated[str, Text()]
Line = Annotated[str, Text(_LONGEST_LINE)]
Address = Annotated[str, Text(512, is_name=True)]
Facts = Annotated[dict[str, Any], Table()]
PerHost = Annotated[tuple[int, ...], Runs()]
Asked = Annotated[Request, Kind()]

_CHECKS: dict[type, tuple[tuple[str, Check], ...]] = {}


def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    """Names and checks of the fields of a dataclass, in their order."""
    if kind not in _CHECKS:
        hints = get_type_hints(kind, include_extras=True)
        _CHECKS[kind] = tuple((f.name, hints[f.name].__metadata__[0]) for f in fields(kind))
    return _CHECKS[kind]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far one worker got, as its host last saw it. Ages, not instants: clocks of two hosts say nothing together."""

    rank: Count
    step: CountOrNone
    phase: Phase
    age_s: Seconds
    """How long ago it entered the phase."""
    tick: Count = 0
    kept: CountOrNone = -1
    own_sum_s: Seconds = 0.0
    num_own: Count = 0
    lane: Count = 0


class Rows:
    """The progress of a host's workers, each a bare list: it travels with every beat."""

    def encode(self, value: tuple[RankProgress, ...]) -> list[list[Any]]:
        return [[getattr(row, name) for name, _ in _checks(RankProgress)] for row in value]

    def decode(self, name: str, value: Any) -> tuple[RankProgress, ...]:
        if type(value) is not list or len(value) > _MAX_WORKERS_PER_HOST:
            raise ProtocolError(f"{name} must be a list of at most {_MAX_WORKERS_PER_HOST} rows")
        checks = _checks(RankProgress)
        if not all(type(row) is list and len(row) == len(checks) for row in value):
            raise ProtocolError(f"{name} must be rows of {len(checks)} values")
        return tuple(
            RankProgress(*(check.decode(f"{name}.{key}", item) for (key, check), item in zip(checks, row, strict=True)))
            for row in value
        )


Progress = Annotated[tuple[RankProgress, ...], Rows()]


@dataclass(frozen=True, slots=True)
class Body:
    """The root of all bodies; ``kind`` is its name on the wire."""

    kind: ClassVar[str] = ""


# --- host to lead


@dataclass(frozen=True, slots=True)
class Join(Body):
    """I am here and no worker of mine lives. Every attempt is a session of its own."""

    kind: ClassVar[str] = "join"
    num_workers: Room
    """How many it has room for."""
    generation: CountOrNone = -1
    """The newest that it has heard of, under any lead; the next one is newer."""
    facts: Facts = field(default_factory=dict)
    """What else the lead's policy may want to know of it: address, version, devices."""


@dataclass(frozen=True, slots=True)
class Beat(Body):
    """I live; how far my workers are, and what of the lead's orders I have heard."""

    kind: ClassVar[str] = "beat"
    seq: Count
    generation: CountOrNone = -1
    has_store: YesNo = False
    num_asked: Count = 0
    progress: Progress = ()


@dataclass(frozen=True, slots=True)
class Broken(Body):
    """A worker of mine failed."""

    kind: ClassVar[str] = "broken"
    generation: Count
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fenced(Body):
    """No worker of mine of that generation lives, nor will one be born."""

    kind: ClassVar[str] = "fenced"
    generation: Count
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done(Body):
    """All my workers of that generation have left by themselves."""

    kind: ClassVar[str] = "done"
    generation: Count
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leaving(Body):
    """I was asked to go (a preemption): take my workers out at the next step."""

    kind: ClassVar[str] = "leaving"
    reason: Words = ""


@dataclass(frozen=True, slots=True)
class Event(Body):
    """What a worker told its agent, passed on."""

    kind: ClassVar[str] = "event"
    generation: Count
    rank: CountOrNone
    event: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output(Body):
    """A line that a worker printed."""

    kind: ClassVar[str] = "output"
    generation: Count
    rank: CountOrNone
    line: Line = ""


@dataclass(frozen=True, slots=True)
class Note(Body):
    """What a person should know of that host, in a sentence."""

    kind: ClassVar[str] = "note"
    text: Line


# --- both ways


@dataclass(frozen=True, slots=True)
class Store(Body):
    """Where the generation's group forms: from the host of rank 0 to the lead, and from there to all, it included."""

    kind: ClassVar[str] = "store"
    generation: Count
    address: Address


# --- lead to host


@dataclass(frozen=True, slots=True)
class Welcome(Body):
    """You are known; beat like this. The lease runs from when the joining was sent."""

    kind: ClassVar[str] = "welcome"
    beat_s: Pause
    lease_s: Pause
    plan: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeatBack(Body):
    """I heard that beat: your lease runs for ``lease_s`` from when you sent it."""

    kind: ClassVar[str] = "beat_back"
    seq: Count
    beat_s: Pause
    lease_s: Pause


@dataclass(frozen=True, slots=True)
class Begin(Body):
    """Start your workers of this generation."""

    kind: ClassVar[str] = "begin"
    generation: Count
    number: Count
    """Which of the hosts you are, in the order of ranks."""
    per_host: PerHost
    """How many workers each host has, in the order of ranks."""
    payload: Facts = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.per_host[self.number]

    @property
    def world_size(self) -> int:
        return sum(self.per_host)

    @property
    def ranks(self) -> range:
        """Those of this host."""
        first = sum(self.per_host[: self.number])
        return range(first, first + self.num_workers)

    @property
    def hosts(self) -> tuple[int, ...]:
        """On which host each rank is, by number: ``World.hosts``."""
        return tuple(number for number, count in enumerate(self.per_host) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Ask(Body):
    """Ask your workers; each hears it at its next step. ``number`` counts the requests of a generation, from 1."""

    kind: ClassVar[str] = "ask"
    generation: Count
    number: Ordinal
    request: Asked


@dataclass(frozen=True, slots=True)
class Fence(Body):
    """Kill your workers of that generation, and start none of it any more; then answer ``Fenced``."""

    kind: ClassVar[str] = "fence"
    generation: Count


@dataclass(frozen=True, slots=True)
class Dismiss(Body):
    """You are not needed any more, or not wanted: kill what lives and end."""

    kind: ClassVar[str] = "dismiss"
    reason: Words = ""
    rescues: YesNo = False
    """The job failed with a state that is in memory alone: write down what you hold of it."""


_TO_LEAD = (Join, Beat, Store, Broken, Fenced, Done, Leaving, Event, Output, Note)
_TO_HOST = (Welcome, BeatBack, Begin, Ask, Fence, Dismiss)
_KINDS: dict[str, type[Body]] = {kind.kind: kind for kind in (*_TO_LEAD, *_TO_HOST)}
_HEAD: tuple[tuple[str, Check], ...] = (
    ("term", Whole()),
    ("host", Text(255, is_name=True)),
    ("incarnation", Whole()),
    ("session", Whole()),
)


@dataclass(frozen=True, slots=True)
class Letter:
    """A body with its head, which names the host at the far end whoever of the two writes."""

    term: int
    """Of the lead that writes or is written to; 0 from a host that knows none yet."""
    host: str
    incarnation: int
    """One life of that host's agent; a later life has a larger number (the time of its start will do)."""
    session: int
    """One joining within that life."""
    body: Body

    def to_fields(self) -> Fields:
        """Plain JSON values; ``kind`` and the head first."""
        told: Fields = {"kind": self.body.kind}
        for name, _ in _HEAD:
            told[name] = getattr(self, name)
        for name, check in _checks(type(self.body)):
            told[name] = check.encode(getattr(self.body, name))
        return told

    @classmethod
    def from_fields(cls, told: Any) -> Letter:
        """Raises ``ProtocolError``."""
        if type(told) is not dict:
            raise ProtocolError("a message must be a table")
        kind = _KINDS.get(told["kind"]) if type(told.get("kind")) is str else None
        if kind is None:
            raise ProtocolError(f"there is no message of the kind {str(told.get('kind'))[:40]!r}")
        checks = _checks(kind)
        _same_names(kind.kind, told, checks)
        head = {name: check.decode(f"{kind.kind}.{name}", told[name]) for name, check in _HEAD}
        body = kind(**{name: check.decode(f"{kind.kind}.{name}", told[name]) for name, check in checks})
        if isinstance(body, Begin) and body.number >= len(body.per_host):
            raise ProtocolError(f"begin.number is {body.number} among {len(body.per_host)} hosts")
        return cls(**head, body=body)


def _same_names(kind: str, told: Fields, checks: tuple[tuple[str, Check], ...]) -> None:
    wanted = {"kind", *(name for name, _ in _HEAD), *(name for name, _ in checks)}
    if missing := sorted(wanted - told.keys()):
        raise ProtocolError(f"{kind} lacks {', '.join(missing)}")
    if len(told) > len(wanted):
        raise ProtocolError(f"{kind} has a field that it should not have")

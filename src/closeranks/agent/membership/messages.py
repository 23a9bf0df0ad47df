"""The messages between the agent of a host and the leader.

    host -> leader   Join Heartbeat StoreAddress WorkerFailed Fenced WorkersDone Leaving
                     WorkerEvent WorkerOutput HostNote
    leader -> host   Welcome HeartbeatAck BeginGeneration StoreAddress WorkerRequest Fence Dismiss

A message is an ``Envelope``: the host at one end (name, incarnation, session), the term, and a body. An
``incarnation`` is one start of a host's agent, with the memory it keeps; a ``session`` is one join of that agent. A
term identifies a leader: no two leaders share one. Invariant: ``from_fields`` accepts what ``to_fields`` produced and
rejects everything else with a ``ProtocolError``; every field of a decoded message has been validated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, get_type_hints

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.membership.field_codecs import (
    BoolCodec,
    DictCodec,
    FieldCodec,
    FloatCodec,
    IntCodec,
    ProtocolError,
    RequestCodec,
    RunLengthCodec,
    StrCodec,
)
from closeranks.core.requests import RunRequest

Fields = dict[str, Any]

_MAX_WORKERS_PER_HOST = 4096
_LONGEST_LINE = 1 << 20

Count = Annotated[int, IntCodec()]
Ordinal = Annotated[int, IntCodec(1)]
CountOrNone = Annotated[int, IntCodec(-1)]
"""-1: none yet."""
NumWorkers = Annotated[int, IntCodec(1, _MAX_WORKERS_PER_HOST)]
PhaseNumber = Annotated[int, IntCodec(0, len(WorkerPhase) - 1)]
Seconds = Annotated[float, FloatCodec()]
Interval = Annotated[float, FloatCodec(0.001, 3600.0)]
Flag = Annotated[bool, BoolCodec()]
Text = Annotated[str, StrCodec()]
Line = Annotated[str, StrCodec(_LONGEST_LINE)]
AddressText = Annotated[str, StrCodec(512, is_name=True)]
JsonObject = Annotated[dict[str, Any], DictCodec()]
PerHost = Annotated[tuple[int, ...], RunLengthCodec()]
RequestField = Annotated[RunRequest, RequestCodec()]

_CODECS: dict[type, tuple[tuple[str, FieldCodec], ...]] = {}


def _codecs_of(kind: type) -> tuple[tuple[str, FieldCodec], ...]:
    """Names and codecs of the fields of a dataclass, in order."""
    if kind not in _CODECS:
        hints = get_type_hints(kind, include_extras=True)
        _CODECS[kind] = tuple((f.name, hints[f.name].__metadata__[0]) for f in fields(kind))
    return _CODECS[kind]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one worker, as its host last saw it. Ages, not instants: clocks of two hosts cannot be compared."""

    rank: Count
    step: CountOrNone
    phase: PhaseNumber
    age_s: Seconds
    """How long ago it entered the phase."""
    micro_batches_done: Count = 0
    snapshot_step: CountOrNone = -1
    compute_sum_s: Seconds = 0.0
    num_timed: Count = 0
    pipeline_rank: Count = 0


class ProgressCodec:
    """The progress of a host's workers, each row a list without names, because it is sent with every heartbeat."""

    def encode(self, value: tuple[RankProgress, ...]) -> list[list[Any]]:
        return [[getattr(row, name) for name, _ in _codecs_of(RankProgress)] for row in value]

    def decode(self, name: str, value: Any) -> tuple[RankProgress, ...]:
        if type(value) is not list or len(value) > _MAX_WORKERS_PER_HOST:
            raise ProtocolError(f"{name} must be a list of at most {_MAX_WORKERS_PER_HOST} rows")
        codecs = _codecs_of(RankProgress)
        if not all(type(row) is list and len(row) == len(codecs) for row in value):
            raise ProtocolError(f"{name} must be rows of {len(codecs)} values")
        return tuple(
            RankProgress(*(codec.decode(f"{name}.{key}", item) for (key, codec), item in zip(codecs, row, strict=True)))
            for row in value
        )


ProgressRows = Annotated[tuple[RankProgress, ...], ProgressCodec()]


@dataclass(frozen=True, slots=True)
class MessageBody:
    """Base class of all bodies; ``kind`` is the name on the wire."""

    kind: ClassVar[str] = ""


# --- host to leader


@dataclass(frozen=True, slots=True)
class Join(MessageBody):
    """The host asks to join; none of its workers is alive. Every attempt is a session of its own."""

    kind: ClassVar[str] = "join"
    num_workers: NumWorkers
    """Its capacity."""
    generation: CountOrNone = -1
    """The newest generation it knows of, under any leader; the next one is newer."""
    facts: JsonObject = field(default_factory=dict)
    """What else the leader's restart policy may need: address, version, devices."""


@dataclass(frozen=True, slots=True)
class Heartbeat(MessageBody):
    """The host is alive; with the progress of its workers and which of the leader's orders it has received."""

    kind: ClassVar[str] = "beat"
    seq: Count
    generation: CountOrNone = -1
    has_store: Flag = False
    num_asked: Count = 0
    progress: ProgressRows = ()


@dataclass(frozen=True, slots=True)
class WorkerFailed(MessageBody):
    """A worker of the host failed."""

    kind: ClassVar[str] = "broken"
    generation: Count
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fenced(MessageBody):
    """No worker of that generation is alive on the host, and none will be started."""

    kind: ClassVar[str] = "fenced"
    generation: Count
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkersDone(MessageBody):
    """All workers of that generation on the host have exited by themselves."""

    kind: ClassVar[str] = "done"
    generation: Count
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leaving(MessageBody):
    """The host was asked to leave (a preemption): remove its workers at the next step."""

    kind: ClassVar[str] = "leaving"
    reason: Text = ""


@dataclass(frozen=True, slots=True)
class WorkerEvent(MessageBody):
    """An event that a worker sent to its agent, passed on."""

    kind: ClassVar[str] = "event"
    generation: Count
    rank: CountOrNone
    event: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerOutput(MessageBody):
    """A line that a worker printed."""

    kind: ClassVar[str] = "output"
    generation: Count
    rank: CountOrNone
    line: Line = ""


@dataclass(frozen=True, slots=True)
class HostNote(MessageBody):
    """A sentence about that host for the user."""

    kind: ClassVar[str] = "note"
    text: Line


# --- both ways


@dataclass(frozen=True, slots=True)
class StoreAddress(MessageBody):
    """Address of the generation's store: from the host of rank 0 to the leader, and from there to every member, the
    host of rank 0 included."""

    kind: ClassVar[str] = "store"
    generation: Count
    address: AddressText


# --- leader to host


@dataclass(frozen=True, slots=True)
class Welcome(MessageBody):
    """The host is accepted; with its heartbeat interval and lease. The lease runs from when the join was sent."""

    kind: ClassVar[str] = "welcome"
    beat_s: Interval
    lease_s: Interval
    plan: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeartbeatAck(MessageBody):
    """Acknowledges a heartbeat: the host's lease runs for ``lease_s`` from when the host sent that heartbeat."""

    kind: ClassVar[str] = "beat_back"
    seq: Count
    beat_s: Interval
    lease_s: Interval


@dataclass(frozen=True, slots=True)
class BeginGeneration(MessageBody):
    """Orders the host to start its workers of this generation."""

    kind: ClassVar[str] = "begin"
    generation: Count
    number: Count
    """The index of the receiving host, in rank order."""
    per_host: PerHost
    """How many workers each host has, in rank order."""
    payload: JsonObject = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.per_host[self.number]

    @property
    def world_size(self) -> int:
        return sum(self.per_host)

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        first = sum(self.per_host[: self.number])
        return range(first, first + self.num_workers)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The index of each rank's host: ``World.hosts``."""
        return tuple(number for number, count in enumerate(self.per_host) for _ in range(count))


@dataclass(frozen=True, slots=True)
class WorkerRequest(MessageBody):
    """A request for the host's workers; each reads it at its next step. ``number`` counts the requests of a generation,
    from 1."""

    kind: ClassVar[str] = "ask"
    generation: Count
    number: Ordinal
    request: RequestField


@dataclass(frozen=True, slots=True)
class Fence(MessageBody):
    """Orders the host to kill its workers of that generation, start no more of them, and then answer ``Fenced``."""

    kind: ClassVar[str] = "fence"
    generation: Count


@dataclass(frozen=True, slots=True)
class Dismiss(MessageBody):
    """The host is no longer needed, or not accepted: it kills its workers and ends."""

    kind: ClassVar[str] = "dismiss"
    reason: Text = ""
    rescues: Flag = False
    """The job failed with state that is only in memory: the host writes its snapshots to disk."""


_TO_LEADER = (
    Join,
    Heartbeat,
    StoreAddress,
    WorkerFailed,
    Fenced,
    WorkersDone,
    Leaving,
    WorkerEvent,
    WorkerOutput,
    HostNote,
)
_TO_HOST = (Welcome, HeartbeatAck, BeginGeneration, WorkerRequest, Fence, Dismiss)
_KINDS: dict[str, type[MessageBody]] = {kind.kind: kind for kind in (*_TO_LEADER, *_TO_HOST)}
_HEADER: tuple[tuple[str, FieldCodec], ...] = (
    ("term", IntCodec()),
    ("host", StrCodec(255, is_name=True)),
    ("incarnation", IntCodec()),
    ("session", IntCodec()),
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A body with its header, which names the host (not the leader) in both directions."""

    term: int
    """Term of the leader that sends or receives it; 0 from a host that knows no leader yet."""
    host: str
    incarnation: int
    """One start of that host's agent; a later start has a larger number (its time serves)."""
    session: int
    """One join within that incarnation."""
    body: MessageBody

    def to_fields(self) -> Fields:
        """Plain JSON values; ``kind`` and the header first."""
        values: Fields = {"kind": self.body.kind}
        for name, _ in _HEADER:
            values[name] = getattr(self, name)
        for name, codec in _codecs_of(type(self.body)):
            values[name] = codec.encode(getattr(self.body, name))
        return values

    @classmethod
    def from_fields(cls, values: Any) -> Envelope:
        """Raises ``ProtocolError``."""
        if type(values) is not dict:
            raise ProtocolError("a message must be a table")
        kind = _KINDS.get(values["kind"]) if type(values.get("kind")) is str else None
        if kind is None:
            raise ProtocolError(f"there is no message of the kind {str(values.get('kind'))[:40]!r}")
        codecs = _codecs_of(kind)
        _check_names(kind.kind, values, codecs)
        header = {name: codec.decode(f"{kind.kind}.{name}", values[name]) for name, codec in _HEADER}
        body = kind(**{name: codec.decode(f"{kind.kind}.{name}", values[name]) for name, codec in codecs})
        if isinstance(body, BeginGeneration) and body.number >= len(body.per_host):
            raise ProtocolError(f"begin.number is {body.number} among {len(body.per_host)} hosts")
        return cls(**header, body=body)


def _check_names(kind: str, values: Fields, codecs: tuple[tuple[str, FieldCodec], ...]) -> None:
    wanted = {"kind", *(name for name, _ in _HEADER), *(name for name, _ in codecs)}
    if missing := sorted(wanted - values.keys()):
        raise ProtocolError(f"{kind} lacks {', '.join(missing)}")
    if len(values) > len(wanted):
        raise ProtocolError(f"{kind} has a field that it should not have")

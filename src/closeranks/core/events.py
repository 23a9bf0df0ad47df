"""What can happen in a run, as typed values that machines can read?

Each event is a frozen dataclass; ``encode`` gives one JSON-able dict with its name under ``event`` and ``decode`` gives
the dataclass back. Invariant: readers ignore fields they do not know, so that a run folder written by a newer version
can still be read; a missing field takes its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from closeranks.core.dataclass_fields import checked_fields

JsonValue = Any


@dataclass(frozen=True, slots=True)
class Event:
    """The root of all events; ``name`` is what stands under ``event`` in the JSON line."""

    name: ClassVar[str] = "event"


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    name: ClassVar[str] = "run_started"
    rank: int = 0
    world_size: int = 1
    generation: int = 0
    first_step: int = 0
    last_step: int = 0
    layout: str = ""
    """How the model is spread, where it is: ``data=2 zero=3``."""
    device: str = "cpu"
    precision: str = "float32"
    num_params: int = 0
    num_trainable: int = 0
    flops_per_item: float = 0.0
    """Forward and backward, for one item (a token, or a sample where there are no tokens)."""
    item: str = "token"
    datasheet_flops: float | None = None
    """Dense peak of one device at this precision, from the vendor; None where no datasheet is known."""
    measured_flops: float | None = None
    """What a large matrix product reached on this device at the start of the run."""
    bucket_mib: float = 0.0
    """The size of the buckets that gradients travel in; 0 where they do not (one data rank, zero=3)."""
    link_latency_s: float | None = None
    """Between two ranks, where it was measured to choose that size;"""
    link_bytes_per_s: float | None = None
    """and what one sent to the other in a second."""
    versions: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """Where the run writes: a script may choose it after whoever started it."""
    sync: str = ""
    """How gradients travel, in words, where that is not one plain sum."""
    rate: str = ""
    """How the learning rate was scaled to the batch, in words; empty where it was not."""
    apart: str = ""
    """Local SGD and its outer steps, in words; empty without local SGD."""
    global_batch: int = 0
    """Samples of a step, over all ranks,"""
    micro_batch: int = 0
    """and of one forward and backward. 0: recorded by a version that did not say."""


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """One optimizer step, as the vote of all ranks settled it."""

    name: ClassVar[str] = "step"
    step: int = 0
    """Number of finished steps, so the first step reports 1."""
    loss: float = 0.0
    weight: float = 0.0
    """What the summed loss was divided by: target tokens, or samples."""
    grad_norm: float = 0.0
    lr: float = 0.0
    taken: bool = True
    """False when the ranks agreed to skip the update (a value that is not finite)."""
    loss_scale: float = 1.0
    items: int = 0
    """Items (tokens or samples) this step put through the model, over all ranks."""
    position: int = 0
    """Cursor into the global sample order after this step."""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    data_wait_s: float = 0.0
    """Time this rank stood waiting for its next batch."""
    data_read_s: float = 0.0
    """What its readers spent on this step's samples, in the background too: reading them where they lie,"""
    data_fetch_s: float = 0.0
    """bringing their files here,"""
    data_decode_s: float = 0.0
    """decoding them,"""
    data_collate_s: float = 0.0
    """and making a batch of them."""
    num_bad: int = 0
    """Bad samples of this step, over all ranks, which count nothing."""
    memory_bytes: int = 0
    """Peak on the accelerator since the run began, or the resident set on a CPU."""


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    name: ClassVar[str] = "eval"
    step: int = 0
    loss: float = 0.0
    weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_bad: int = 0
    """Bad samples that were left out, over all ranks."""


@dataclass(frozen=True, slots=True)
class NoiseSeen(Event):
    """How noisy gradients are, by all measurements so far."""

    name: ClassVar[str] = "noise"
    step: int = 0
    noise_scale: float | None = None
    """In samples: well below it a larger batch pays, well above it gains little. None: too noisy to tell yet."""
    batch: int = 0
    """Samples of this step."""


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint counts: it is durable, and was read back."""

    name: ClassVar[str] = "saved"
    step: int = 0
    path: str = ""
    bytes: int = 0
    """Of the whole state, what lies in an earlier checkpoint included."""
    seconds: float = 0.0
    """From the moment the state was taken until it counted."""
    stall_s: float = 0.0
    """How long training was blocked by it on rank 0."""
    tier: str = "primary"
    """``primary``, or ``remote``: the second, durable place."""


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save came to nothing. Training goes on, what was saved before still counts, and it is tried again."""

    name: ClassVar[str] = "save_failed"
    step: int = 0
    what: str = ""
    rank: int = 0
    tier: str = "primary"


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """Checkpoints that retention removed."""

    name: ClassVar[str] = "pruned"
    step: int = 0
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run goes on from a checkpoint; at step 0 it took weights alone."""

    name: ClassVar[str] = "resumed"
    step: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something a person should know that does not stop the run."""

    name: ClassVar[str] = "warning"
    what: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshotting(Event):
    """How the state is kept in memory, said once when it is known what that costs, and again when it changes."""

    name: ClassVar[str] = "snapshots"
    step: int = 0
    every: int = 1
    """A copy is taken after so many steps; a fault costs at most so many finished ones, and as many more in the moments
    in which a copy is not sealed yet."""
    bytes: int = 0
    """Of one rank's copies, those it keeps for a peer included."""
    cost_s: float = 0.0
    """How long training stands still for one."""
    copies: str = ""
    """Where the second copy is, in words: ``replica``, ``peer``, ``peer on another host``, ``none``."""


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """A generation took over the state of the one before."""

    name: ClassVar[str] = "restored"
    step: int = 0
    source: str = ""
    """``memory``, ``peer``, ``checkpoint`` or ``start``: the farthest that any rank had to go."""
    generation: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """What was found torn or corrupt on the way."""


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """The agent says that a generation is over, and which rank ended it."""

    name: ClassVar[str] = "rank_lost"
    generation: int = 0
    rank: int = 0
    """-1: nobody in particular."""
    host: str = ""
    step: int | None = None
    """The step it was at; None before its first."""
    kind: str = ""
    """``killed``, ``oom``, ``exception``, ``hang``, ``stopped`` (SIGSTOP), ``slow``, ``preempted``, ``host``,
    ``zygote`` or ``resize``."""
    cause: str = ""
    """One line for people."""
    detected_s: float = 0.0
    """Between its last sign of life and this verdict, as far as that is known."""


@dataclass(frozen=True, slots=True)
class RanksClosed(Event):
    """The first step after a fault is finished on all ranks."""

    name: ClassVar[str] = "ranks_closed"
    generation: int = 0
    step: int = 0
    """The step that is finished now."""
    seconds: float = 0.0
    """Since the fault was noticed."""
    num_redone: int = 0
    """Finished steps that had to be done again."""
    world_size: int = 1
    layout: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Where the seconds went: ``fence``, ``fork``, ``open``, ``restore``, ``step``."""


@dataclass(frozen=True, slots=True)
class SlowRank(Event):
    """A rank that takes longer than the others for its own computing, waiting not counted."""

    name: ClassVar[str] = "slow_rank"
    rank: int = 0
    host: str = ""
    step: int = 0
    score: float = 1.0
    """Its time over the median of the others'."""
    own_s: float = 0.0
    median_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compressed(Event):
    """What compression lost of one step's gradient, measured on a sample of its values."""

    name: ClassVar[str] = "compressed"
    step: int = 0
    relative_error: float = 0.0
    """Size of the difference to the exact sum over the size of the exact sum. What is left out now is sent later, and
    what was left out before comes now, so that values near and above 1 are usual where little is sent."""
    cosine: float = 1.0
    """Of the angle between what was summed and the exact sum."""


@dataclass(frozen=True, slots=True)
class HostChanged(Event):
    """A host came, left, was lost, or is quarantined."""

    name: ClassVar[str] = "host"
    host: str = ""
    change: str = ""
    """``joined``, ``left``, ``lost``, ``quarantined``."""
    why: str = ""
    num_workers: int = 0


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    name: ClassVar[str] = "run_ended"
    step: int = 0
    reason: str = "finished"
    """``finished``, ``drained`` (asked to stop), ``stopped`` (a hook said so), or ``failed``."""
    seconds: float = 0.0
    detail: str = ""
    """Why it stopped or failed, in words."""


_EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        *(RunStarted, StepDone, Evaluated, Saved, SaveFailed, Pruned, Resumed, Warned, RunEnded),
        *(Snapshotting, Restored, RankLost, RanksClosed, SlowRank, HostChanged, Compressed, NoiseSeen),
    )
}


def encode(event: Event) -> dict[str, JsonValue]:
    """One JSON-able dict, the event's name first. Nothing is copied deeply: events are flat, and it runs each step."""
    return {"event": event.name, **{f.name: getattr(event, f.name) for f in fields(event)}}


def decode(line: dict[str, JsonValue]) -> Event | None:
    """The event of a JSON line, or None for a kind this version does not know or a line that no version wrote."""
    kind = _EVENTS.get(str(line.get("event")))
    if kind is None:
        return None
    try:
        return kind(**checked_fields(kind, line))
    except TypeError:
        return None

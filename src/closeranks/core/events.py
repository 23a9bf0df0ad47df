"""The events of a run, as typed values that machines can read.

Each event is a frozen dataclass; ``encode`` gives one JSON-able dict with its name under ``event`` and ``decode`` gives
the dataclass back. Invariant: readers ignore fields they do not know, so that a run folder written by a newer version
can still be read; a missing field takes its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from closeranks.core.dataclass_fields import checked_fields

JsonValue = Any


@dataclass(frozen=True, slots=True)
class Event:
    """The base class of all events; ``name`` is the value of ``event`` in the JSON line."""

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
    """The parallel layout of the model, where there is one: ``data=2 zero=3``."""
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
    device_memory_bytes: int = 0
    """Memory of the device, or on CPUs this worker's share of the host's; 0: recorded by a version without it."""
    bucket_mib: float = 0.0
    """The size of gradient buckets; 0 if gradients are not bucketed (one data rank, zero=3)."""
    link_latency_s: float | None = None
    """Latency between two ranks, where it was measured to choose the bucket size;"""
    link_bytes_per_s: float | None = None
    """and the bandwidth from one to the other."""
    versions: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """The run folder: a script may choose it only after it has been launched."""
    sync: str = ""
    """How gradients are reduced, in words, where that is not one plain sum."""
    rate: str = ""
    """How the learning rate was scaled to the batch, in words; empty where it was not."""
    apart: str = ""
    """Local SGD and its outer steps, in words; empty without local SGD."""
    global_batch: int = 0
    """Samples per step, over all ranks,"""
    micro_batch: int = 0
    """and per forward and backward. 0: recorded by a version that did not write it."""
    hardware_flops_per_item: float = 0.0
    """``flops_per_item`` and what recompute repeats of it; 0: not known."""
    target_loss: float | None = None
    """What the job wants to reach (``telemetry.target_loss``),"""
    target_of: str = "training"
    """and of what loss: ``evaluation`` or ``training``."""
    process_s: float = 0.0
    """Age of this rank's process: imports, forming the group, building the model and restoring its state."""


@dataclass(frozen=True, slots=True)
class FlopsCounted(Event):
    """The FLOPs of a model whose spec does not know them, counted on the first micro-batch."""

    name: ClassVar[str] = "flops_counted"
    flops_per_item: float = 0.0
    """As in ``RunStarted``; 0: they could not be counted."""
    hardware_flops_per_item: float = 0.0
    seconds: float = 0.0
    """How long it took."""
    why: str = ""
    """Why they could not be counted, in words."""

    def added_to(self, started: RunStarted) -> RunStarted:
        return replace(
            started, flops_per_item=self.flops_per_item, hardware_flops_per_item=self.hardware_flops_per_item
        )


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """One optimizer step, with the values that all ranks agreed on."""

    name: ClassVar[str] = "step"
    step: int = 0
    """Number of finished steps, so the first step reports 1."""
    loss: float = 0.0
    weight: float = 0.0
    """What the summed loss was divided by: target tokens, or samples."""
    grad_norm: float = 0.0
    lr: float = 0.0
    taken: bool = True
    """False if the ranks agreed to skip the update (a value that is not finite)."""
    loss_scale: float = 1.0
    items: int = 0
    """Items (tokens or samples) this step put through the model, over all ranks."""
    position: int = 0
    """Cursor into the global sample order after this step."""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    data_wait_s: float = 0.0
    """Time this rank was blocked waiting for its next batch."""
    data_read_s: float = 0.0
    """What its readers spent on this step's samples, background work included: reading the data,"""
    data_fetch_s: float = 0.0
    """downloading files,"""
    data_decode_s: float = 0.0
    """decoding samples,"""
    data_collate_s: float = 0.0
    """and collating them into a batch."""
    staleness: float = 0.0
    """With stale or asynchronous parameter servers: how many steps of updates the weights lacked that gradients were
    computed with, on average."""
    dropped: list[int] = field(default_factory=list)
    """With backup workers: the workers whose pushes came too late for this step."""
    num_bad: int = 0
    """Bad samples of this step, over all ranks, which have no weight."""
    memory_bytes: int = 0
    """Peak on the accelerator since the run began, or the resident set on a CPU."""


@dataclass(frozen=True, slots=True)
class StepPhases(Event):
    """Where the time of a step went on this rank, from its beginning to that of the next (``core.phases``)."""

    name: ClassVar[str] = "phases"
    step: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, which add up to ``seconds``. ``AXIS.COLLECTIVE`` is time spent waiting for a collective."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank sent, by ``AXIS.COLLECTIVE``, hidden behind computation or not (``core.traffic``),"""
    calls: dict[str, int] = field(default_factory=dict)
    """and the number of collectives."""


@dataclass(frozen=True, slots=True)
class Resources(Event):
    """What a rank's process, its control group, its host and its accelerator did in an interval. Keys that a machine
    does not know are absent (docs/resources.md lists all)."""

    name: ClassVar[str] = "resources"
    seconds: float = 0.0
    """Length of the interval; totals such as bytes are what was added in it."""
    host_number: int = 0
    """Ranks with the same number are on one host."""
    process: dict[str, float] = field(default_factory=dict)
    """This rank's process and its child processes."""
    cgroup: dict[str, float] = field(default_factory=dict)
    """The control group that the process is in."""
    host_wide: dict[str, float] = field(default_factory=dict)
    """The whole host; recorded by its first rank only."""
    gpu: dict[str, float] = field(default_factory=dict)
    gpu_throttled_by: list[str] = field(default_factory=list)
    """Why the clocks of the accelerator were lowered at the end of the interval."""
    address: str = ""
    """Where this rank sends to other hosts from; empty if it has no connection to any,"""
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """and how fast, while it has something to send, by their addresses."""


@dataclass(frozen=True, slots=True)
class MemoryUsed(Event):
    """What the memory of a rank's device was used for: once after the second step, once at the end."""

    name: ClassVar[str] = "memory"
    step: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """Bytes by kind: ``parameters``, ``gradients``, ``optimizer``, ``buffers`` (other state), ``activations`` and
    ``workspace`` (on an accelerator), and ``snapshots``, which are in the host's memory."""
    peak_bytes: int = 0
    """Peak on the accelerator since the run began, or the resident set on a CPU."""
    total_bytes: int = 0
    """Memory of the device."""


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
    """The gradient noise scale, estimated from all measurements so far."""

    name: ClassVar[str] = "noise"
    step: int = 0
    noise_scale: float | None = None
    """In samples: well below it a larger batch pays, well above it gains little. None: too noisy to tell yet."""
    batch: int = 0
    """Samples of this step."""


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint is complete: it is durable, and was read back."""

    name: ClassVar[str] = "saved"
    step: int = 0
    path: str = ""
    bytes: int = 0
    """Of the whole state, including what an earlier checkpoint already holds."""
    seconds: float = 0.0
    """From the snapshot of the state until the checkpoint was complete."""
    stall_s: float = 0.0
    """How long the save blocked training on rank 0."""
    tier: str = "primary"
    """``primary``, or ``remote``: the second, durable storage."""


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save failed. Training continues, earlier checkpoints stay valid, and the save is tried again."""

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
    """The run continues from a checkpoint; at step 0 it took the weights alone."""

    name: ClassVar[str] = "resumed"
    step: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something the user should know that does not stop the run."""

    name: ClassVar[str] = "warning"
    what: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshotting(Event):
    """How snapshots of the state are kept in memory; emitted once their cost is known, and again when that changes."""

    name: ClassVar[str] = "snapshots"
    step: int = 0
    every: int = 1
    """A snapshot is taken every so many steps; a fault costs at most so many finished steps, and up to twice as many
    while a snapshot is not sealed yet."""
    bytes: int = 0
    """Of one rank's snapshots, including those it keeps for a peer."""
    cost_s: float = 0.0
    """How long one snapshot blocks training."""
    copies: str = ""
    """Where the second copy is, in words: ``replica``, ``peer``, ``peer on another host``, ``none``."""


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """A generation restored the state of the one before."""

    name: ClassVar[str] = "restored"
    step: int = 0
    source: str = ""
    """``memory``, ``peer``, ``checkpoint`` or ``start``: the most distant source that any rank needed."""
    generation: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """Copies that were found torn or corrupt on the way."""


@dataclass(frozen=True, slots=True)
class Standstill(Event):
    """No rank makes progress, or ranks have failed because their collectives do not match: who waits for whom, and
    probably why. It says nothing about what follows: a run that is declared hung also has a ``RankLost``."""

    name: ClassVar[str] = "standstill"
    generation: int = 0
    step: int | None = None
    """The step of the ranks that hold up the others; None before the first."""
    seconds: float = 0.0
    """For how long nothing has moved; 0 if ranks have failed instead."""
    rank: int = -1
    """The rank that holds up the others; -1: none in particular."""
    host: str = ""
    kind: str = ""
    """``branch`` (one rank issued another collective), ``shape``, ``dtype``, ``order``, ``loader``, ``stopped``,
    ``disk``, ``link``, ``user_code``, ``busy``, ``asleep`` or ``unknown``."""
    cause: str = ""
    """One sentence."""
    lines: list[str] = field(default_factory=list)
    """What each rank waits in or does, one line for the ranks that do the same."""


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """The agent declares that a generation is over, and which rank ended it."""

    name: ClassVar[str] = "rank_lost"
    generation: int = 0
    rank: int = 0
    """-1: no particular rank."""
    host: str = ""
    step: int | None = None
    """The step it was at; None before its first."""
    kind: str = ""
    """``killed``, ``oom``, ``exception``, ``hang``, ``stopped`` (SIGSTOP), ``slow``, ``preempted``, ``host``,
    ``zygote`` or ``resize``."""
    cause: str = ""
    """One line for the user."""
    detected_s: float = 0.0
    """Between its last sign of life and this verdict, as far as that is known."""


@dataclass(frozen=True, slots=True)
class RanksClosed(Event):
    """Recovery is complete: the first step after a fault is finished on all ranks."""

    name: ClassVar[str] = "ranks_closed"
    generation: int = 0
    step: int = 0
    """The step that was just finished."""
    seconds: float = 0.0
    """Since the fault was detected."""
    num_redone: int = 0
    """Finished steps that had to be done again."""
    world_size: int = 1
    layout: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Where the seconds went: ``fence``, ``fork``, ``open``, ``restore``, ``step``."""


@dataclass(frozen=True, slots=True)
class SlowRank(Event):
    """A rank whose own computation takes longer than that of the others; waiting is not counted."""

    name: ClassVar[str] = "slow_rank"
    rank: int = 0
    host: str = ""
    step: int = 0
    score: float = 1.0
    """Its time divided by the median of the others'."""
    own_s: float = 0.0
    median_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PushesDropped(Event):
    """What backup workers have left out since the run began, at its end and wherever it stops; nothing was lost: later
    steps took the same samples."""

    name: ClassVar[str] = "pushes_dropped"
    step: int = 0
    """Steps of the run so far."""
    dropped: list[int] = field(default_factory=list)
    """By worker: steps that left it out."""
    samples: list[int] = field(default_factory=list)
    """By worker: samples that steps took from it. The bias: a worker that is often late has less than an even share."""
    returned: int = 0
    """Samples that came too late for a step and were taken by a later one,"""
    returned_weight: float = 1.0
    """and their mean weight (tokens) over that of all samples: above 1, samples that take long come later."""
    waiting: int = 0
    """Samples still to be taken."""


@dataclass(frozen=True, slots=True)
class SharesChanged(Event):
    """From the next step on, slower workers take fewer micro-batches of each step, or more again."""

    name: ClassVar[str] = "shares"
    step: int = 0
    """The last step with the shares before."""
    of: str = "data rank"
    """What has a share: ``data rank``, or ``replica`` with local SGD."""
    shares: list[int] = field(default_factory=list)
    """Micro-batches of a step that each takes,"""
    before: list[int] = field(default_factory=list)
    """and that it took until now."""


@dataclass(frozen=True, slots=True)
class Compressed(Event):
    """The error that compression caused in one step's gradient, measured on a sample of its values."""

    name: ClassVar[str] = "compressed"
    step: int = 0
    relative_error: float = 0.0
    """Norm of the difference to the exact sum, divided by the norm of the exact sum. With error feedback, what is left
    out now is sent later and what was left out before is sent now, so values near and above 1 are usual at high
    compression."""
    cosine: float = 1.0
    """Cosine of the angle between what was summed and the exact sum."""


@dataclass(frozen=True, slots=True)
class HostChanged(Event):
    """A host joined, left, was lost, or is quarantined."""

    name: ClassVar[str] = "host"
    host: str = ""
    change: str = ""
    """``joined``, ``leaving``, ``left``, ``lost`` or ``quarantined``."""
    why: str = ""
    num_workers: int = 0


@dataclass(frozen=True, slots=True)
class Launched(Event):
    """A command has started this run, or resumed it: recorded by its agent once rank 0 has begun."""

    name: ClassVar[str] = "launched"
    seconds: float = 0.0
    """Since the command was started."""


@dataclass(frozen=True, slots=True)
class LaunchEnded(Event):
    """All workers of a command have ended."""

    name: ClassVar[str] = "launch_ended"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    name: ClassVar[str] = "run_ended"
    step: int = 0
    reason: str = "finished"
    """``finished``, ``drained`` (asked to stop), ``stopped`` (a hook said so), ``regrouped`` (another generation
    continues), or ``failed``."""
    seconds: float = 0.0
    detail: str = ""
    """Why it stopped or failed, in words."""


_EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        *(RunStarted, FlopsCounted, StepDone, StepPhases, Resources, MemoryUsed, Evaluated),
        *(Saved, SaveFailed, Pruned, Resumed, Warned, RunEnded),
        *(Snapshotting, Restored, RankLost, RanksClosed, SlowRank, HostChanged, Compressed, NoiseSeen, Standstill),
        *(PushesDropped, SharesChanged, Launched, LaunchEnded),
    )
}


def encode(event: Event) -> dict[str, JsonValue]:
    """One JSON-able dict, the event's name first. Nothing is copied deeply: events are flat; this runs every step."""
    return {"event": event.name, **{f.name: getattr(event, f.name) for f in fields(event)}}


def decode(line: dict[str, JsonValue]) -> Event | None:
    """The event of a JSON line; None for a kind this version does not know, or for a line that no version wrote."""
    kind = _EVENTS.get(str(line.get("event")))
    if kind is None:
        return None
    try:
        return kind(**checked_fields(kind, line))
    except TypeError:
        return None

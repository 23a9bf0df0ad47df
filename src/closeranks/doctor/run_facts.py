"""What a diagnosis knows of a run: its settings, where the time of its steps went by rank, what happened in between.

Pure: decoded events in, one value out; the means that rules ask for are computed once. Invariants: a redone step counts
once; the first steps of each process, which warm up and compile, do not count, nor does the last step of the job, which
waits for the final save; all means are over the same steps on every rank, so that they can be compared.

[Note: exposed and uneven] A rank that waits for a collective waits for two things: that the last rank arrives, and the
transfer itself. The rank that arrives last waits only for the transfer, so in each step the least waiting of any rank
is exposed communication, and what the others wait beyond it is caused by uneven ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

from closeranks.core import phases
from closeranks.core.errors import ConfigError
from closeranks.core.events import (
    Evaluated,
    Event,
    RankLost,
    Resources,
    RunStarted,
    Saved,
    Standstill,
    StepDone,
    StepPhases,
    Warned,
)
from closeranks.core.phases import BACKWARD, FORWARD
from closeranks.doctor.nccl_log import NcclLog
from closeranks.facts.devices import is_cpu
from closeranks.facts.layout import Layout

PIPELINE = "pipeline."
_AGREEING = frozenset({phases.VOTE, phases.OUTER_STEP})


def is_waiting(phase: str) -> bool:
    """Whether a phase is time spent waiting for other ranks."""
    return "." in phase or phase in _AGREEING


@dataclass(frozen=True)
class RunFacts:
    started: RunStarted = field(default_factory=RunStarted)
    """Of the last generation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved job."""
    steps: tuple[StepDone, ...] = ()
    """Counted steps, as rank 0 recorded them; of a long run a sample, evenly spread."""
    times: Mapping[int, tuple[StepPhases, ...]] = field(default_factory=dict)
    """By rank: where the time of each counted step went; the same steps for every rank."""
    evals: tuple[Evaluated, ...] = ()
    saves: tuple[Saved, ...] = ()
    lost: tuple[RankLost, ...] = ()
    standstills: tuple[Standstill, ...] = ()
    warnings: tuple[Warned, ...] = ()
    resources: Mapping[int, tuple[Resources, ...]] = field(default_factory=dict)
    """By rank: what was used, in intervals; empty if nothing was sampled (a short run)."""
    device_busy_s: Mapping[int, float] = field(default_factory=dict)
    """By rank: how long its device is busy in a step, from a trace; empty without one."""
    nccl: NcclLog | None = None
    """What NCCL printed about its transports; None if it printed nothing (``NCCL_DEBUG`` was not set)."""
    notes: tuple[str, ...] = ()
    """What of the metrics was not read, or could not be, in sentences."""

    def setting(self, key: str) -> Any:
        """A value of the job by its dotted key; None for a missing key."""
        found: Any = self.settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def layout(self) -> Layout:
        try:
            return Layout.parse(self.started.layout or f"data={self.started.world_size}")
        except ConfigError:  # a damaged record
            return Layout(data=self.started.world_size)

    @cached_property
    def is_cpu(self) -> bool:
        return is_cpu(self.started.device)

    @cached_property
    def num_steps(self) -> int:
        return len(next(iter(self.times.values()), ()))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.times))

    @cached_property
    def step_s(self) -> float:
        """The mean time from one step to the next, which evaluations and saves are part of."""
        return fmean(one.seconds for own in self.times.values() for one in own) if self.num_steps else 0.0

    @cached_property
    def by_rank(self) -> Mapping[int, Mapping[str, float]]:
        """Mean seconds per step, by rank and phase."""
        return {rank: _means(own) for rank, own in self.times.items() if own}

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Mean seconds per step by phase, over all ranks."""
        names = dict.fromkeys(name for own in self.by_rank.values() for name in own)
        return {name: fmean(own.get(name, 0.0) for own in self.by_rank.values()) for name in names}

    def mean_s(self, *names: str) -> float:
        """Mean seconds of a step in these phases, over all ranks."""
        return sum(self.phases.get(name, 0.0) for name in names)

    def share(self, seconds: float) -> float:
        """Seconds as a share of a step."""
        return seconds / self.step_s if self.step_s else 0.0

    def rank_s(self, rank: int, *names: str) -> float:
        return sum(self.by_rank.get(rank, {}).get(name, 0.0) for name in names)

    @cached_property
    def waiting(self) -> tuple[str, ...]:
        """The phases in which ranks wait for each other, the pipeline's excepted: longest first."""
        names = (name for name in self.phases if is_waiting(name) and not name.startswith(PIPELINE))
        return tuple(sorted(names, key=lambda name: -self.phases[name]))

    @cached_property
    def exposed_s(self) -> Mapping[str, float]:
        """Mean seconds per step of communication that nothing hides, by phase: see [Note: exposed and uneven]."""
        least = dict.fromkeys(self.waiting, 0.0)
        for step in zip(*self.times.values(), strict=True):
            for name in least:
                least[name] += min(one.phases.get(name, 0.0) for one in step)
        return {name: total / max(1, self.num_steps) for name, total in least.items()}

    def sent_each_step(self, phase: str) -> tuple[float, float]:
        """Collectives of a step and the bytes that a rank sends in them, in the mean over all ranks and steps."""
        steps = [one for own in self.times.values() for one in own]
        if not steps:
            return 0.0, 0.0
        return fmean(one.calls.get(phase, 0) for one in steps), fmean(one.sent_bytes.get(phase, 0) for one in steps)

    def own_s(self, one: StepPhases) -> float:
        """How long a rank was busy with its own work in a step: everything but waiting for other ranks."""
        return sum(spent for name, spent in one.phases.items() if not is_waiting(name))

    @cached_property
    def own_by_rank(self) -> Mapping[int, float]:
        """Median seconds per step that a rank was busy with its own work."""
        return {rank: median(map(self.own_s, own)) for rank, own in self.times.items() if own}

    @cached_property
    def uneven_s(self) -> float:
        """How much longer a step takes than if its work were spread evenly, in the mean over all steps."""
        gaps = []
        for step in zip(*self.times.values(), strict=True):
            own = [self.own_s(one) for one in step]
            gaps.append(max(own) - fmean(own))
        return fmean(gaps) if gaps else 0.0

    def used_mean(self, rank: int, group: str, name: str) -> float:
        """The mean of a figure of docs/resources.md over the samples of a rank that have it; 0 if none has."""
        values = [getattr(one, group)[name] for one in self.resources.get(rank, ()) if name in getattr(one, group)]
        return fmean(values) if values else 0.0

    def used_per_s(self, rank: int, group: str, name: str) -> float:
        seconds = sum(one.seconds for one in self.resources.get(rank, ()))
        total = sum(getattr(one, group).get(name, 0.0) for one in self.resources.get(rank, ()))
        return total / seconds if seconds > 0 else 0.0

    def sent_bytes_per_s(self, rank: int) -> float:
        """What a rank sent to others, over its counted steps."""
        own = self.times.get(rank, ())
        seconds = sum(one.seconds for one in own)
        return sum(sum(one.sent_bytes.values()) for one in own) / seconds if seconds > 0 else 0.0

    def ranks_of_host(self, host_number: int) -> tuple[int, ...]:
        return tuple(rank for rank, used in self.resources.items() if used and used[0].host_number == host_number)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; empty if nothing was sampled."""
        numbers = sorted({used[0].host_number for used in self.resources.values() if used})
        return tuple(map(self.ranks_of_host, numbers))

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[float, float]]:
        """By host number: processors that other programs than this run used, and how many there are."""
        found = {}
        for rank, used in self.resources.items():
            if used and "cpus" in used[0].host_wide:
                host = used[0].host_number
                ours = sum(self.used_mean(other, "process", "cpus") for other in self.ranks_of_host(host))
                others = max(0.0, self.used_mean(rank, "host_wide", "cpus") - ours)
                found[host] = (others, self.used_mean(rank, "host_wide", "num_cpus"))
        return found

    @cached_property
    def busy_cpus(self) -> float:
        """The share of the processors of rank 0's host that are busy; 0 if it was not sampled."""
        num = self.used_mean(0, "host_wide", "num_cpus")
        return self.used_mean(0, "host_wide", "cpus") / num if num else 0.0

    @cached_property
    def memory_room(self) -> float:
        """The memory of a device (on CPUs, a worker's share of the host's) over the peak of rank 0; 1 if not known."""
        most = max((step.memory_bytes for step in self.steps), default=0)
        return self.started.device_memory_bytes / most if most and self.started.device_memory_bytes else 1.0

    @cached_property
    def num_micro(self) -> int:
        """Micro-batches that a data rank processes in a step; 0 if it is not known."""
        started = self.started
        if not (started.micro_batch and started.global_batch):
            return 0
        all_micro = -(-started.global_batch // started.micro_batch)
        return -(-all_micro // max(1, self.layout.data))

    @cached_property
    def computing_s(self) -> float:
        """Forward and backward of a step, the mean over the ranks."""
        return self.mean_s(FORWARD, BACKWARD)

    @cached_property
    def reached(self) -> float:
        """What computing reaches of what a large matrix product was measured to; 0 if it is not known."""
        started, peak = self.started, self.started.measured_flops
        if not peak or not self.steps or self.computing_s <= 0:
            return 0.0
        items = sum(step.items for step in self.steps) / len(self.steps)
        return items * started.flops_per_item / (started.world_size * self.computing_s) / peak


def _means(own: Sequence[StepPhases]) -> Mapping[str, float]:
    total: dict[str, float] = {}
    for one in own:
        for name, spent in one.phases.items():
            total[name] = total.get(name, 0.0) + spent
    return {name: spent / len(own) for name, spent in total.items()}


def collect_facts(
    settings: Mapping[str, Any],
    steps: Iterable[StepDone],
    times: Mapping[int, Mapping[int, StepPhases]],
    first_steps: Iterable[int] = (),
    events: Iterable[Event] = (),
    resources: Mapping[int, Sequence[Resources]] | None = None,
    device_busy_s: Mapping[int, float] | None = None,
    nccl: NcclLog | None = None,
) -> RunFacts:
    """``times``: by rank, then by step. ``events``: further events of rank 0 and of the agent, in any order."""
    kinds = list(events)
    started = next((one for one in reversed(kinds) if isinstance(one, RunStarted)), RunStarted())
    common = frozenset.intersection(*(frozenset(own) for own in times.values())) if times else frozenset()
    counted = common - frozenset(first_steps) - {started.last_step}
    return RunFacts(
        started=started,
        settings=settings,
        steps=tuple(step for step in steps if step.step in counted),
        times={rank: tuple(own[step] for step in sorted(counted)) for rank, own in sorted(times.items())},
        evals=tuple(one for one in kinds if isinstance(one, Evaluated)),
        saves=tuple(one for one in kinds if isinstance(one, Saved)),
        lost=tuple(one for one in kinds if isinstance(one, RankLost)),
        standstills=tuple(one for one in kinds if isinstance(one, Standstill)),
        warnings=tuple(one for one in kinds if isinstance(one, Warned)),
        resources={rank: tuple(own) for rank, own in sorted((resources or {}).items())},
        device_busy_s=device_busy_s or {},
        nccl=nccl,
    )

"""What the injector sees of a run, and when a fault is due.

The agent passes a view of its workers whenever it calls the injector (``agent.job_view.JobView`` has this shape). Pure.
Invariant: a fault is due when its target works on the step it names or a later one, never before, and never in a run
that is ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from closeranks.elastic.faults.fault import InjectedFault


class ObservedProgress(Protocol):
    """The progress that a worker reported last."""

    @property
    def step(self) -> int | None: ...

    @property
    def phase(self) -> IntEnum: ...


class ObservedWorker(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def progress(self) -> ObservedProgress: ...


class ObservedRun(Protocol):
    """The state of a run on this host at one moment."""

    @property
    def now(self) -> float: ...

    @property
    def state(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def local_workers(self) -> Sequence[ObservedWorker]: ...

    @property
    def snapshot_paths(self) -> Sequence[Sequence[str]]: ...

    @property
    def zygote(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Since when a rank has been at its step, and how long its previous step took."""

    step: int
    since: float
    last_s: float = 0.0
    generation: int = 0


def update_timings(timings: dict[int, StepTiming], observed: ObservedRun) -> dict[int, StepTiming]:
    """The step timings of all ranks, updated with one more observation."""
    after = dict(timings)
    for worker in observed.local_workers:
        step, last = worker.progress.step, timings.get(worker.rank)
        if step is None or (last is not None and (step, observed.generation) == (last.step, last.generation)):
            continue
        took_s = last.last_s if last is not None else 0.0
        if last is not None and (step, observed.generation) == (last.step + 1, last.generation):
            took_s = observed.now - last.since  # the time between two generations is not a step
        after[worker.rank] = StepTiming(step, observed.now, took_s, observed.generation)
    return after


def worker_of(observed: ObservedRun, rank: int) -> ObservedWorker | None:
    return next((worker for worker in observed.local_workers if worker.rank == rank and worker.pid is not None), None)


def step_of(observed: ObservedRun, fault: InjectedFault) -> int | None:
    """The step that the target is at, or the most advanced worker if the fault names no rank."""
    ranks = fault.victims[:1] or tuple(worker.rank for worker in observed.local_workers)
    steps = [worker.progress.step for worker in observed.local_workers if worker.rank in ranks]
    return max((step for step in steps if step is not None), default=None)


def is_due(fault: InjectedFault, observed: ObservedRun, timings: dict[int, StepTiming]) -> bool:
    if observed.state != "running" or any(worker_of(observed, rank) is None for rank in fault.victims):
        return False
    if any(worker.progress.phase.name in ("START", "END") for worker in observed.local_workers):
        return False
    step = step_of(observed, fault)
    if step is None or step < fault.step:
        return False
    timing = timings.get(fault.victims[0]) if fault.victims else None
    if step > fault.step or timing is None or timing.step != step:
        return True
    return observed.now - timing.since >= fault.at * timing.last_s

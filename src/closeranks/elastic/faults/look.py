"""What does whoever strikes see of a run, and when is it time?

The agent shows its workers at every turn of its loop (``agent.view.View`` has this shape). Pure. Invariant: a fault is
due when its victim works on the step it names, or on a later one, never before and never in a run that is ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from closeranks.elastic.faults.fault import Fault


class Stand(Protocol):
    """The last that a worker wrote of itself."""

    @property
    def step(self) -> int | None: ...

    @property
    def phase(self) -> IntEnum: ...


class Worker(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def progress(self) -> Stand: ...


class Look(Protocol):
    """One moment of a run on this host."""

    @property
    def now(self) -> float: ...

    @property
    def state(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def seen(self) -> Sequence[Worker]: ...

    @property
    def boxes(self) -> Sequence[Sequence[str]]: ...

    @property
    def zygote(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Since when a rank is at its step, and how long it took for the last."""

    step: int
    since: float
    last_s: float = 0.0
    generation: int = 0


def paced(paces: dict[int, Pace], look: Look) -> dict[int, Pace]:
    """The paces of all ranks, after one more look."""
    after = dict(paces)
    for worker in look.seen:
        step, last = worker.progress.step, paces.get(worker.rank)
        if step is None or (last is not None and (step, look.generation) == (last.step, last.generation)):
            continue
        took_s = last.last_s if last is not None else 0.0
        if last is not None and (step, look.generation) == (last.step + 1, last.generation):
            took_s = look.now - last.since  # what lies between two generations was no step
        after[worker.rank] = Pace(step, look.now, took_s, look.generation)
    return after


def worker_of(look: Look, rank: int) -> Worker | None:
    return next((worker for worker in look.seen if worker.rank == rank and worker.pid is not None), None)


def step_of(look: Look, fault: Fault) -> int | None:
    """The step that the victim is at, or the farthest worker where nobody is meant in particular."""
    ranks = fault.victims[:1] or tuple(worker.rank for worker in look.seen)
    steps = [worker.progress.step for worker in look.seen if worker.rank in ranks]
    return max((step for step in steps if step is not None), default=None)


def is_due(fault: Fault, look: Look, paces: dict[int, Pace]) -> bool:
    if look.state != "running" or any(worker_of(look, rank) is None for rank in fault.victims):
        return False
    if any(worker.progress.phase.name in ("START", "END") for worker in look.seen):
        return False
    step = step_of(look, fault)
    if step is None or step < fault.step:
        return False
    pace = paces.get(fault.victims[0]) if fault.victims else None
    if step > fault.step or pace is None or pace.step != step:
        return True
    return look.now - pace.since >= fault.at * pace.last_s

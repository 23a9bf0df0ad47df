"""What is done to a run from the agent's own process, beside the faults that everybody can write down: outside the
workers, at a moment that they do not know."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from closeranks.agent.job_view import JobView, WorkerView
from closeranks.elastic.faults.processes import TargetProcess

POLL_S = 0.005
_UNFIT = ("START", "END")


@dataclass(frozen=True)
class Touch:
    """Put a file there when a rank works on a step: an order to misbehave, or to die at a point."""

    path: str
    rank: int
    step: int

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.state != "running" or worker is None or worker.progress.phase.name in _UNFIT:
            return False
        if (worker.progress.step or 0) < self.step:
            return False
        Path(self.path).touch()
        return True


@dataclass(frozen=True)
class Newborn:
    """SIGKILL to a worker of a generation as soon as it is there, in the middle of what brings the run back."""

    rank: int
    generation: int

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.generation != self.generation or worker is None or worker.pid is None:
            return False
        try:
            with TargetProcess(worker.pid) as victim:
                victim.signal(signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True)
class Late:
    """SIGKILL to a worker of a generation when it has lived for some time, wherever it stands then."""

    rank: int
    generation: int
    after_s: float

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.generation != self.generation or worker is None or worker.pid is None:
            return False
        try:
            with TargetProcess(worker.pid) as victim:
                if time.time() - psutil.Process(worker.pid).create_time() < self.after_s:
                    return False
                victim.signal(signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True


@dataclass(frozen=True)
class Jump:
    """The wall clock of the whole run jumps: faketime reads this file at every look at a clock."""

    path: str
    offset: str
    step: int

    def is_done(self, view: JobView) -> bool:
        if max((worker.progress.step or 0 for worker in view.local_workers), default=0) < self.step:
            return False
        aside = f"{self.path}.aside"
        Path(aside).write_text(f"{self.offset}\n")
        os.replace(aside, self.path)
        return True


Special = Touch | Newborn | Late | Jump
_KINDS: dict[str, type[Special]] = {kind.__name__: kind for kind in (Touch, Newborn, Late, Jump)}


def encode(specials: Sequence[Special]) -> str:
    return json.dumps([{"kind": type(one).__name__, **asdict(one)} for one in specials])


def decode(text: str) -> list[Special]:
    rows = json.loads(text)
    return [_KINDS[row.pop("kind")](**row) for row in rows]


@dataclass(frozen=True)
class Done:
    """A strike, as ``elastic.faults.inject.Strike`` tells of one."""

    fault: str
    at: float
    generation: int
    step: int = 0
    note: str = ""
    error: str = ""


class Strikes:
    """All of them, each once, in any order."""

    def __init__(self, specials: Sequence[Special]) -> None:
        self.pending = list(specials)
        self.done: list[Done] = []

    def __call__(self, view: JobView) -> float | None:
        for one in list(self.pending):
            at = time.time()
            if one.is_done(view):
                self.pending.remove(one)
                self.done.append(Done(str(one), at, view.generation))
        return time.monotonic() + POLL_S if self.pending else None


def _worker(view: JobView, rank: int) -> WorkerView | None:
    return next((worker for worker in view.local_workers if worker.rank == rank and worker.pid is not None), None)

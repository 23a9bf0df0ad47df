"""Faults that only tests inject, from the agent's process, in addition to those with a notation of their own: outside
the workers, at a time that they do not know."""

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
_IDLE_PHASES = ("START", "END")


@dataclass(frozen=True)
class TouchFile:
    """Create a file when a rank works on a step: a request to misbehave, or to die at a failpoint."""

    path: str
    rank: int
    step: int

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.state != "running" or worker is None or worker.progress.phase.name in _IDLE_PHASES:
            return False
        if (worker.progress.step or 0) < self.step:
            return False
        Path(self.path).touch()
        return True


@dataclass(frozen=True)
class KillNewWorker:
    """SIGKILL to a worker of a generation as soon as it exists, in the middle of a recovery."""

    rank: int
    generation: int

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.generation != self.generation or worker is None or worker.pid is None:
            return False
        try:
            with TargetProcess(worker.pid) as target:
                target.signal(signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True)
class KillAfter:
    """SIGKILL to a worker of a generation when it has run for some time, whatever it does then."""

    rank: int
    generation: int
    after_s: float

    def is_done(self, view: JobView) -> bool:
        worker = _worker(view, self.rank)
        if view.generation != self.generation or worker is None or worker.pid is None:
            return False
        try:
            with TargetProcess(worker.pid) as target:
                if time.time() - psutil.Process(worker.pid).create_time() < self.after_s:
                    return False
                target.signal(signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True


@dataclass(frozen=True)
class ClockJump:
    """The wall clock of the whole run jumps: faketime reads this file whenever a clock is read."""

    path: str
    offset: str
    step: int

    def is_done(self, view: JobView) -> bool:
        if max((worker.progress.step or 0 for worker in view.local_workers), default=0) < self.step:
            return False
        temporary = f"{self.path}.aside"
        Path(temporary).write_text(f"{self.offset}\n")
        os.replace(temporary, self.path)
        return True


AgentFault = TouchFile | KillNewWorker | KillAfter | ClockJump
_KINDS: dict[str, type[AgentFault]] = {kind.__name__: kind for kind in (TouchFile, KillNewWorker, KillAfter, ClockJump)}


def encode(agent_faults: Sequence[AgentFault]) -> str:
    return json.dumps([{"kind": type(one).__name__, **asdict(one)} for one in agent_faults])


def decode(text: str) -> list[AgentFault]:
    rows = json.loads(text)
    return [_KINDS[row.pop("kind")](**row) for row in rows]


@dataclass(frozen=True)
class InjectedAgentFault:
    """An injected fault, with the fields of ``elastic.faults.inject.Injection``."""

    fault: str
    at: float
    generation: int
    step: int = 0
    note: str = ""
    error: str = ""


class AgentInjector:
    """Injects each fault once, in any order."""

    def __init__(self, agent_faults: Sequence[AgentFault]) -> None:
        self.pending = list(agent_faults)
        self.done: list[InjectedAgentFault] = []

    def __call__(self, view: JobView) -> float | None:
        for one in list(self.pending):
            at = time.time()
            if one.is_done(view):
                self.pending.remove(one)
                self.done.append(InjectedAgentFault(str(one), at, view.generation))
        return time.monotonic() + POLL_S if self.pending else None


def _worker(view: JobView, rank: int) -> WorkerView | None:
    return next((worker for worker in view.local_workers if worker.rank == rank and worker.pid is not None), None)

"""Detects hangs of this host's workers by observing them, without their cooperation.

Combines the deadlines of each phase (``hang``) with the kernel's view of the processes (``process_probe``). Invariant:
checking costs the workers nothing; they are asked for their stacks, for the log, only when a hang has been found.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from closeranks.agent.detection.hang import (
    Hang,
    HangDeadlines,
    HangDetector,
    ProcessSample,
    narrow_by_data_read,
    narrow_by_kernel,
    narrow_by_stack,
)
from closeranks.agent.detection.process_probe import (
    SAMPLE_S,
    data_read_location,
    describe_children,
    kernel_state,
    main_thread_location,
    main_thread_user_location,
    sample_processes,
)
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.detection.standstill.explanation import MISMATCHES, explain
from closeranks.agent.detection.standstill.hang_report import HangReport
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.workers.worker_process import WorkerProcess

_STACKS_S = 0.15
"""How long workers have to print their stacks."""
_STOPPED_SAMPLE_S = 0.02
"""Nothing has to be waited for to see that a process is stopped."""
_LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class HangCheck:
    hang: Hang | None
    """The ranks that hang, as far as this host can see."""
    is_stall: bool
    """Whether no deadline has passed yet: it is told, and ends nothing."""
    next_at: float


class HangMonitor:
    """The hang monitor of one host. Call ``begin`` before each generation."""

    def __init__(self, limits: FaultLimits, loop: EventLoop) -> None:
        self._loop = loop
        self._detector = HangDetector(HangDeadlines(limits.hang_floor_s, limits.hang_factor, limits.first_s))
        self._floor_s = limits.hang_floor_s
        self._next_at = 0.0

    def begin(self) -> None:
        self._detector.begin()
        self._next_at = 0.0

    def check(self, workers: Sequence[WorkerProcess], now: float) -> HangCheck:
        """Check for a hang; cheap when it is called before it is due."""
        if now < self._next_at:
            return HangCheck(None, is_stall=False, next_at=self._next_at)
        alive = _alive(workers)
        progress_of = {rank: replace(worker.progress, at=worker.alive_at) for rank, worker in alive.items()}
        states = {rank: kernel_state(worker.pid or 0) for rank, worker in alive.items()}
        hang = self._detector.check(progress_of, states, now)
        self._next_at = now + self._detector.every_s
        stall = None
        if hang is None:
            stall = self._detector.stall(progress_of, now, lambda: _is_mismatch(alive.values(), now, self._floor_s))
        return HangCheck(hang or stall, is_stall=stall is not None, next_at=self._next_at)

    def examine(self, hang: Hang, workers: Sequence[WorkerProcess]) -> HangReport:
        """The same hang with fewer suspects, where the kernel or the stacks tell some from the others, and what is
        known about each rank. Afterwards every worker's stacks are in its log, unless a worker is merely stopped."""
        alive = _alive(workers)
        seconds = _STOPPED_SAMPLE_S if hang.is_stopped else SAMPLE_S
        samples = sample_processes({rank: worker.pid for rank, worker in alive.items()}, seconds)
        logs: dict[int, tuple[str, ...]] = {}
        if not hang.is_stopped:
            hang = narrow_by_kernel(hang, samples)
            logs = self._collect_stacks(alive)
            hang = _narrow_by_logs(hang, logs)
        now = time.monotonic()
        evidence = [_evidence(worker, samples.get(rank), logs.get(rank, ()), now) for rank, worker in alive.items()]
        return HangReport(hang, tuple(evidence))

    def _collect_stacks(self, alive: dict[int, WorkerProcess]) -> dict[int, tuple[str, ...]]:
        """The ends of all logs, with the stacks of every thread in them. A worker that waits for data may have it read
        by other processes; those are asked first, because two processes that print at once would garble the lines."""
        reading = [worker for worker in alive.values() if worker.progress.phase is WorkerPhase.DATA]
        for worker in reading:
            worker.ask_children_for_stacks()
        if reading:
            self._wait()
        for worker in alive.values():
            worker.ask_for_stacks()
        self._wait()
        return {rank: worker.log_tail(_LOG_LINES) for rank, worker in alive.items()}

    def _wait(self) -> None:
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            self._loop.run_once(deadline)


def _is_mismatch(workers: Iterable[WorkerProcess], now: float, floor_s: float) -> bool:
    """Whether their records alone say that they will never meet. Records are read one after the other, so they say
    nothing while one of them still changes."""
    evidence = {worker.world.rank: worker.evidence(now) for worker in workers}
    if any(one.collectives and one.collectives[-1].age_s < floor_s for one in evidence.values()):
        return False
    found = explain(evidence)
    return found is not None and found.kind in MISMATCHES


def _narrow_by_logs(hang: Hang, logs: Mapping[int, tuple[str, ...]]) -> Hang:
    if hang.phase is WorkerPhase.DATA:
        found = {rank: data_read_location(logs[rank]) for rank in hang.suspects if rank in logs}
        return narrow_by_data_read(hang, found)
    if hang.culprit is not None or hang.is_stopped:
        return hang
    return narrow_by_stack(hang, {rank: main_thread_location(log) for rank, log in logs.items()})


def _evidence(worker: WorkerProcess, sample: ProcessSample | None, log: Sequence[str], now: float) -> RankEvidence:
    known = worker.evidence(now)
    reads = known.phase is WorkerPhase.DATA
    return replace(
        known,
        sample=sample,
        place=main_thread_user_location(log) or main_thread_location(log),
        reading=data_read_location(log) if reads else "",
        loaders=describe_children(worker.pid) if reads and worker.pid is not None else (),
    )


def _alive(workers: Sequence[WorkerProcess]) -> dict[int, WorkerProcess]:
    return {worker.world.rank: worker for worker in workers if worker.pid is not None and not worker.is_dead}

"""Detects hangs of this host's workers by observing them, without their cooperation.

Combines the deadlines of each phase (``hang``) with the kernel's view of the processes (``process_probe``). Invariant:
checking costs the workers nothing; they are asked for their stacks, for the log, only when a hang has been found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from closeranks.agent.detection.hang import (
    Hang,
    HangDeadlines,
    HangDetector,
    narrow_by_data_read,
    narrow_by_kernel,
    narrow_by_stack,
)
from closeranks.agent.detection.process_probe import (
    data_read_location,
    kernel_state,
    main_thread_location,
    sample_processes,
)
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.workers.worker_process import WorkerProcess

_STACKS_S = 0.15
"""How long workers have to print their stacks."""
_LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class HangCheck:
    hang: Hang | None
    """The ranks that hang, as far as this host can see."""
    next_at: float


class HangMonitor:
    """The hang monitor of one host. Call ``begin`` before each generation."""

    def __init__(self, limits: FaultLimits, loop: EventLoop) -> None:
        self._loop = loop
        self._detector = HangDetector(HangDeadlines(limits.hang_floor_s, limits.hang_factor, limits.first_s))
        self._next_at = 0.0

    def begin(self) -> None:
        self._detector.begin()
        self._next_at = 0.0

    def check(self, workers: Sequence[WorkerProcess], now: float) -> HangCheck:
        """Check for a hang; cheap when it is called before it is due."""
        if now < self._next_at:
            return HangCheck(None, self._next_at)
        alive = _alive(workers)
        progress_of = {rank: replace(worker.progress, at=worker.alive_at) for rank, worker in alive.items()}
        states = {rank: kernel_state(worker.pid or 0) for rank, worker in alive.items()}
        hang = self._detector.check(progress_of, states, now)
        self._next_at = now + self._detector.every_s
        return HangCheck(hang, self._next_at)

    def narrow_suspects(self, hang: Hang, workers: Sequence[WorkerProcess]) -> Hang:
        """The same hang with fewer suspects, where the kernel or the stacks tell some from the others. Afterwards every
        worker's stacks are in its log, unless a worker is merely stopped."""
        alive = _alive(workers)
        if hang.is_stopped:
            return hang
        hang = narrow_by_kernel(hang, sample_processes({rank: worker.pid for rank, worker in alive.items()}))
        logs = self._collect_stacks(alive, hang)
        if hang.phase is WorkerPhase.DATA:
            return narrow_by_data_read(
                hang, {rank: data_read_location(logs[rank]) for rank in hang.suspects if rank in logs}
            )
        places = {rank: main_thread_location(log) for rank, log in logs.items()}
        return narrow_by_stack(hang, places) if hang.culprit is None and not hang.is_stopped else hang

    def _collect_stacks(self, alive: dict[int, WorkerProcess], hang: Hang) -> dict[int, tuple[str, ...]]:
        """The ends of all logs, with the stacks of every thread in them. A worker that waits for data may have it read
        by other processes; those are asked first, because two processes that print at once would garble the lines."""
        if hang.phase is WorkerPhase.DATA:
            for rank in hang.suspects:
                alive[rank].ask_children_for_stacks()
            self._wait()
        for worker in alive.values():
            worker.ask_for_stacks()
        self._wait()
        return {rank: worker.log_tail(_LOG_LINES) for rank, worker in alive.items()}

    def _wait(self) -> None:
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            self._loop.run_once(deadline)


def _alive(workers: Sequence[WorkerProcess]) -> dict[int, WorkerProcess]:
    return {worker.world.rank: worker for worker in workers if worker.pid is not None and not worker.is_dead}

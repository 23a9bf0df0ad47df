"""Detects hangs of this host's workers by observing them, without their cooperation.

Combines the deadlines of each phase (``hang``) with the kernel's view of the processes (``look``). Invariant: checking
costs the workers nothing; they are asked for their stacks, for the log, only when a hang has been found.
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
        self._watch = HangDetector(HangDeadlines(limits.hang_floor_s, limits.hang_factor, limits.first_s))
        self._next_at = 0.0

    def begin(self) -> None:
        self._watch.begin()
        self._next_at = 0.0

    def check(self, members: Sequence[WorkerProcess], now: float) -> HangCheck:
        """Check for a hang; cheap when it is called before it is due."""
        if now < self._next_at:
            return HangCheck(None, self._next_at)
        alive = _alive(members)
        words = {rank: replace(member.progress, at=member.alive_at) for rank, member in alive.items()}
        states = {rank: kernel_state(member.pid or 0) for rank, member in alive.items()}
        still = self._watch.check(words, states, now)
        self._next_at = now + self._watch.every_s
        return HangCheck(still, self._next_at)

    def narrow_suspects(self, still: Hang, members: Sequence[WorkerProcess]) -> Hang:
        """The same hang with fewer suspects, where the kernel or the stacks tell some from the others. Afterwards every
        worker's stacks are in its log."""
        alive = _alive(members)
        if still.is_stopped:
            return still
        still = narrow_by_kernel(still, sample_processes({rank: member.pid for rank, member in alive.items()}))
        logs = self._ask_where(alive, still)
        if still.phase is WorkerPhase.DATA:
            return narrow_by_data_read(
                still, {rank: data_read_location(logs[rank]) for rank in still.suspects if rank in logs}
            )
        places = {rank: main_thread_location(log) for rank, log in logs.items()}
        return narrow_by_stack(still, places) if still.culprit is None and not still.is_stopped else still

    def _ask_where(self, alive: dict[int, WorkerProcess], still: Hang) -> dict[int, tuple[str, ...]]:
        """The ends of all logs, with the stacks of every thread in them. A worker that waits for data may have it read
        by other processes; those are asked first, because two processes that print at once would garble the lines."""
        if still.phase is WorkerPhase.DATA:
            for rank in still.suspects:
                alive[rank].ask_children_for_stacks()
            self._wait()
        for member in alive.values():
            member.ask_for_stacks()
        self._wait()
        return {rank: member.log_tail(_LOG_LINES) for rank, member in alive.items()}

    def _wait(self) -> None:
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            self._loop.run_once(deadline)


def _alive(members: Sequence[WorkerProcess]) -> dict[int, WorkerProcess]:
    return {member.world.rank: member for member in members if member.pid is not None and not member.is_dead}

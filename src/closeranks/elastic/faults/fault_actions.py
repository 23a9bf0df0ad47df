"""The actions that inject and undo each kind of fault.

Each is a real cause from outside the worker: a signal through its pidfd, a control group, a connection that is shut
down, bits in memory that the agent owns, a full disk. Invariant: whatever an action has set up, it removes again in
``undo``, which may be called at any time and more than once.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from closeranks.elastic.faults.cgroups import (
    CPU,
    FREEZER,
    MEMORY,
    CgroupControl,
    CgroupUnavailable,
    ControlGroup,
    find_cgroup_parent,
)
from closeranks.elastic.faults.disk import FillableDisk
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.observed_run import ObservedRun, ObservedWorker, step_of, worker_of
from closeranks.elastic.faults.processes import TargetProcess, await_state, highest_priority
from closeranks.elastic.faults.snapshot_damage import SlotHeaders, flip_bit, newest_sealed

_MOMENT_S = 0.1


class FaultAction:
    """One fault in progress. ``tick`` is called at every poll until it returns True (over), then ``undo``."""

    is_urgent = False
    """Whether ``tick`` should be called again without a pause."""

    def __init__(self, note: str = "", *, is_injected: bool = True) -> None:
        self.note = note
        self.injected_at = time.time() if is_injected else None

    def tick(self, observed: ObservedRun) -> bool:
        return self.injected_at is not None

    def undo(self) -> None: ...


def _target_worker(observed: ObservedRun, rank: int) -> ObservedWorker:
    worker = worker_of(observed, rank)
    if worker is None or worker.pid is None:
        raise ProcessLookupError(f"rank {rank} is not here")
    return worker


def _send(observed: ObservedRun, ranks: tuple[int, ...], number: signal.Signals) -> FaultAction:
    """Signal all of them at once: no signal is sent before all processes are known to exist."""
    targets = [TargetProcess(_target_worker(observed, rank).pid or 0) for rank in ranks]
    try:
        for target in targets:
            target.signal(number)
    finally:
        for target in targets:
            target.close()
    return FaultAction(number.name)


def _cut(fault: InjectedFault, observed: ObservedRun, disk: FillableDisk | None) -> FaultAction:
    with TargetProcess(_target_worker(observed, fault.rank).pid or 0) as target:
        num_cut = target.cut_connections()
    if not num_cut:
        raise OSError(f"rank {fault.rank} has no connection to another")
    return FaultAction(f"{num_cut} connections shut down")


def _kill_zygote(fault: InjectedFault, observed: ObservedRun, disk: FillableDisk | None) -> FaultAction:
    if observed.zygote is None:
        raise ProcessLookupError("there is no zygote now")
    with TargetProcess(observed.zygote) as zygote:
        zygote.signal(signal.SIGKILL)
    return FaultAction("SIGKILL to the zygote")


class _Grouped(FaultAction):
    """Puts a worker into a control group of its own until it is dead. The limits are set before it is moved there."""

    def __init__(
        self, fault: InjectedFault, observed: ObservedRun, need: CgroupControl, note: str, *, is_injected: bool = True
    ) -> None:
        super().__init__(note, is_injected=is_injected)
        parent = find_cgroup_parent(need)
        self._target = TargetProcess(_target_worker(observed, fault.rank).pid or 0)
        self._group = ControlGroup(parent)
        try:
            self.prepare(fault)
            self._group.add(self._target.pid)
        except OSError:
            self.undo()
            raise

    def prepare(self, fault: InjectedFault) -> None:
        raise NotImplementedError

    def tick(self, observed: ObservedRun) -> bool:
        return self._target.is_dead

    def undo(self) -> None:
        self._target.close()
        self._group.remove()


class _Freeze(_Grouped):
    def __init__(self, fault: InjectedFault, observed: ObservedRun) -> None:
        super().__init__(fault, observed, FREEZER, "frozen")

    def prepare(self, fault: InjectedFault) -> None:
        self._group.freeze(True)


def _hang(fault: InjectedFault, observed: ObservedRun, disk: FillableDisk | None) -> FaultAction:
    try:
        return _Freeze(fault, observed)
    except CgroupUnavailable:
        return _send(observed, (fault.rank,), signal.SIGSTOP)


class _Slow(_Grouped):
    def __init__(self, fault: InjectedFault, observed: ObservedRun) -> None:
        self._fault = fault
        super().__init__(fault, observed, CPU, f"{fault.share:.0%} of a processor")

    def prepare(self, fault: InjectedFault) -> None:
        self._group.limit_cpu(fault.share)

    def tick(self, observed: ObservedRun) -> bool:
        step = step_of(observed, self._fault)
        return super().tick(observed) or (step is not None and step > self._fault.last_step)


class _Starve(_Grouped):
    """Allows the worker no further memory: the kernel's OOM killer ends it at the next page it allocates."""

    def __init__(self, fault: InjectedFault, observed: ObservedRun) -> None:
        super().__init__(fault, observed, MEMORY, "no more memory pages", is_injected=False)

    def prepare(self, fault: InjectedFault) -> None:
        self._group.limit_memory(0)

    def tick(self, observed: ObservedRun) -> bool:
        is_over = super().tick(observed)  # checked before the count: it may die between the two
        if self.injected_at is None and self._group.num_oom_kills:
            self.injected_at, self.note = time.time(), "killed by the kernel's out-of-memory killer"
        return is_over


def _own_slot_paths(observed: ObservedRun, worker: ObservedWorker) -> tuple[str, ...]:
    if worker.local_rank >= len(observed.snapshot_paths):
        raise OSError(f"rank {worker.rank} keeps no snapshots in memory")
    return tuple(observed.snapshot_paths[worker.local_rank][:2])


def _flip(fault: InjectedFault, observed: ObservedRun, disk: FillableDisk | None) -> FaultAction:
    """The worker is stopped meanwhile, so that the newest snapshot stays the newest."""
    worker = _target_worker(observed, fault.rank)
    with TargetProcess(worker.pid or 0) as target:
        target.signal(signal.SIGSTOP)
        try:
            slot = newest_sealed(_own_slot_paths(observed, worker))
            if slot is None:
                raise OSError(f"rank {fault.rank} has no sealed snapshot yet")
            bit = flip_bit(slot, random.Random(str(fault)))
        except OSError:
            target.signal(signal.SIGCONT)
            raise
        target.signal(signal.SIGKILL)
    return FaultAction(f"bit {bit} of the snapshot of step {slot.step}, then SIGKILL")


class _Tear(FaultAction):
    """Polls the worker's slots without a pause: writing a snapshot takes a millisecond or less in a small run."""

    is_urgent = True

    def __init__(self, fault: InjectedFault, observed: ObservedRun) -> None:
        super().__init__(is_injected=False)
        worker = _target_worker(observed, fault.rank)
        self._generation = observed.generation
        self._headers = SlotHeaders(_own_slot_paths(observed, worker))
        try:
            self._target = TargetProcess(worker.pid or 0)
        except OSError:
            self._headers.close()
            raise

    def tick(self, observed: ObservedRun) -> bool:
        """Polls for ``_MOMENT_S`` at a time, so that the agent's loop runs in between."""
        deadline = time.monotonic() + _MOMENT_S
        with highest_priority():
            while self.injected_at is None and time.monotonic() < deadline:
                if self._headers.is_writing(self._generation):
                    self._kill()
        return self.injected_at is not None or self._target.is_dead

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._target.signal(signal.SIGKILL)
        self.injected_at = time.time()
        await_state(self._target.pid, "ZX")
        left = ", which left the copy torn" if any(self._headers.are_torn()) else "; the copy finished first"
        self.note = f"SIGKILL while it copied{left}"

    def undo(self) -> None:
        self._headers.close()
        self._target.close()


class _FullDisk(FaultAction):
    def __init__(self, fault: InjectedFault, disk: FillableDisk | None) -> None:
        if disk is None:
            raise OSError("no file system was mounted for the checkpoints before the run")
        super().__init__("no free block left for checkpoints")
        self._fault = fault
        self._disk: FillableDisk | None = disk
        disk.fill()

    def tick(self, observed: ObservedRun) -> bool:
        """Space that a failed save frees is filled again, as it would be on a disk that others fill."""
        step = step_of(observed, self._fault)
        if self._disk is not None:
            with suppress(BlockingIOError):  # a file is being written right now: try again at the next poll
                self._disk.fill()
        return step is not None and step > self._fault.last_step

    def undo(self) -> None:
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.free()


def _to_workers(number: signal.Signals) -> Callable[[InjectedFault, ObservedRun, FillableDisk | None], FaultAction]:
    return lambda fault, observed, disk: _send(observed, fault.victims, number)


FAULT_ACTIONS: dict[str, Callable[[InjectedFault, ObservedRun, FillableDisk | None], FaultAction]] = {
    "kill": _to_workers(signal.SIGKILL),
    "kill2": _to_workers(signal.SIGKILL),
    "exception": _cut,
    "hang": _hang,
    "stop": _to_workers(signal.SIGSTOP),
    "slow": lambda fault, observed, disk: _Slow(fault, observed),
    "oom": lambda fault, observed, disk: _Starve(fault, observed),
    "bitflip": _flip,
    "torn": lambda fault, observed, disk: _Tear(fault, observed),
    "diskfull": lambda fault, observed, disk: _FullDisk(fault, disk),
    "term": _to_workers(signal.SIGTERM),
    "zygote": _kill_zygote,
}

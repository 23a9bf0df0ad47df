"""Injects faults into a run at the steps they name.

The agent calls the injector as often as it asks to be, in the agent's process, outside the workers, which do not know
of it. Invariants: each fault is injected once; a fault that ends a generation waits for the next generation if
such a fault was already injected into this one, so that each has a recovery of its own; whatever was set up is removed
by ``close``, however the run ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from closeranks.core.errors import SetupError
from closeranks.elastic.faults.disk import FillableDisk
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.fault_actions import FAULT_ACTIONS, FaultAction
from closeranks.elastic.faults.observed_run import ObservedRun, StepTiming, is_due, step_of, update_timings
from closeranks.elastic.faults.requirements import unavailable_kinds

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Injection:
    """The record of one injected fault."""

    fault: InjectedFault
    at: float
    """``time.time()``"""
    generation: int
    step: int
    """The step that the target worked on."""
    note: str = ""
    error: str = ""
    """Why the fault could not be injected; empty if it was."""


@dataclass(slots=True)
class _ActiveFault:
    fault: InjectedFault
    action: FaultAction
    generation: int
    step: int
    is_recorded: bool = False


class Injector:
    """Injects ``faults``. Call sequence: construct it before the run starts, pass it to the agent, ``close`` it.

    ``checkpoints``: the folder that a ``diskfull`` fault fills.
    """

    def __init__(self, faults: Sequence[InjectedFault], checkpoints: Path | None = None) -> None:
        self._pending = list(faults)
        self._active: list[_ActiveFault] = []
        self._timings: dict[int, StepTiming] = {}
        self._faulted_generation = -1
        self.injections: list[Injection] = []
        for kind, reason in unavailable_kinds(fault.kind for fault in faults).items():
            raise SetupError(f"the fault {kind} is not possible here: {reason}", "Leave it out, or run as root.")
        self._disk: FillableDisk | None = None
        self._is_open = False
        if checkpoints is not None and any(fault.kind == "diskfull" for fault in faults):
            self._disk = FillableDisk(checkpoints)

    def __call__(self, observed: ObservedRun) -> float | None:
        """One poll; returns the latest time (``time.monotonic()``) for the next one, or None."""
        if not self._is_open:
            self._open(observed)
        self._timings = update_timings(self._timings, observed)
        for one in list(self._active):
            self._advance(one, observed)
        for fault in list(self._pending):
            if self._is_allowed(fault, observed) and is_due(fault, observed, self._timings):
                self._begin(fault, observed)
        if any(one.action.is_urgent for one in self._active):
            return observed.now
        return time.monotonic() + _POLL_S if self._pending or self._active else None

    def _open(self, observed: ObservedRun) -> None:
        """The first poll comes before the first worker is started: set up what must exist before that."""
        self._is_open = True
        if self._disk is not None:
            try:
                self._disk.open()
            except OSError as error:
                self._give_up("diskfull", str(error), observed)

    def _give_up(self, kind: str, why: str, observed: ObservedRun) -> None:
        for fault in [fault for fault in self._pending if fault.kind == kind]:
            self._pending.remove(fault)
            self.injections.append(Injection(fault, time.time(), observed.generation, 0, error=why))

    @property
    def missed(self) -> tuple[InjectedFault, ...]:
        """Faults that were not injected."""
        return (*self._pending, *(one.fault for one in self._active if not one.is_recorded))

    def _is_allowed(self, fault: InjectedFault, observed: ObservedRun) -> bool:
        return not fault.about.ends_generation or observed.generation > self._faulted_generation

    def _begin(self, fault: InjectedFault, observed: ObservedRun) -> None:
        step = step_of(observed, fault) or 0
        try:
            action = FAULT_ACTIONS[fault.kind](fault, observed, self._disk)
        except ProcessLookupError:
            return  # it has just died of something else: the fault is injected into its successor
        except OSError as error:
            self._pending.remove(fault)
            self.injections.append(Injection(fault, time.time(), observed.generation, step, error=str(error)))
            return
        self._pending.remove(fault)
        if fault.about.ends_generation:
            self._faulted_generation = observed.generation
        one = _ActiveFault(fault, action, observed.generation, step)
        self._active.append(one)
        self._advance(one, observed)

    def _advance(self, one: _ActiveFault, observed: ObservedRun) -> None:
        try:
            is_over = one.action.tick(observed)
        except OSError as error:
            is_over, one.is_recorded = True, True
            self.injections.append(Injection(one.fault, time.time(), one.generation, one.step, error=str(error)))
        if one.action.injected_at is not None and not one.is_recorded:
            one.is_recorded = True
            step = step_of(observed, one.fault) if observed.generation == one.generation else one.step
            injection = Injection(one.fault, one.action.injected_at, one.generation, step or one.step, one.action.note)
            self.injections.append(injection)
        if not is_over:
            return
        try:
            one.action.undo()
        except OSError:
            one.action.is_urgent = False  # ``close`` tries again, and says what is wrong
            return
        self._active.remove(one)
        if not one.is_recorded:  # the target was gone before the fault took effect
            self._pending.append(one.fault)
            self._faulted_generation = min(self._faulted_generation, one.generation - 1)

    def close(self) -> None:
        """Undo everything that was set up, apart from the effects of the faults. May be called more than once."""
        with ExitStack() as stack:  # all are tried, even if one fails
            if self._disk is not None:
                stack.callback(self._disk.close)
            for one in self._active:
                stack.callback(one.action.undo)

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

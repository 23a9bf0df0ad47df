"""Injects faults into a run at the steps they name.

The injector is called at every iteration of the agent's loop, in the agent's process, outside the workers, which do not
know of it. Invariants: each fault is injected once; a fault that ends a generation waits for the next generation if
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
from closeranks.elastic.faults.disk import SmallDisk
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
class _Underway:
    fault: InjectedFault
    blow: FaultAction
    generation: int
    step: int
    is_told: bool = False


class Injector:
    """Injects ``faults``. Call sequence: construct it before the run starts, pass it to the agent, ``close`` it.

    ``checkpoints``: the folder that a ``diskfull`` fault fills.
    """

    def __init__(self, faults: Sequence[InjectedFault], checkpoints: Path | None = None) -> None:
        self._pending = list(faults)
        self._underway: list[_Underway] = []
        self._paces: dict[int, StepTiming] = {}
        self._struck_generation = -1
        self.injections: list[Injection] = []
        for kind, reason in unavailable_kinds(fault.kind for fault in faults).items():
            raise SetupError(f"the fault {kind} is not possible here: {reason}", "Leave it out, or run as root.")
        self._disk: SmallDisk | None = None
        self._is_open = False
        if checkpoints is not None and any(fault.kind == "diskfull" for fault in faults):
            self._disk = SmallDisk(checkpoints)

    def __call__(self, look: ObservedRun) -> float | None:
        """One poll; returns the latest time (``time.monotonic()``) for the next one, or None."""
        if not self._is_open:
            self._open(look)
        self._paces = update_timings(self._paces, look)
        for one in list(self._underway):
            self._go_on(one, look)
        for fault in list(self._pending):
            if self._may(fault, look) and is_due(fault, look, self._paces):
                self._begin(fault, look)
        if any(one.blow.is_urgent for one in self._underway):
            return look.now
        return time.monotonic() + _POLL_S if self._pending or self._underway else None

    def _open(self, look: ObservedRun) -> None:
        """The first poll comes before the first worker is started: set up what must exist before that."""
        self._is_open = True
        if self._disk is not None:
            try:
                self._disk.open()
            except OSError as error:
                self._give_up("diskfull", str(error), look)

    def _give_up(self, kind: str, why: str, look: ObservedRun) -> None:
        for fault in [fault for fault in self._pending if fault.kind == kind]:
            self._pending.remove(fault)
            self.injections.append(Injection(fault, time.time(), look.generation, 0, error=why))

    @property
    def missed(self) -> tuple[InjectedFault, ...]:
        """Faults that were not injected."""
        return (*self._pending, *(one.fault for one in self._underway if not one.is_told))

    def _may(self, fault: InjectedFault, look: ObservedRun) -> bool:
        return not fault.about.ends_generation or look.generation > self._struck_generation

    def _begin(self, fault: InjectedFault, look: ObservedRun) -> None:
        step = step_of(look, fault) or 0
        try:
            blow = FAULT_ACTIONS[fault.kind](fault, look, self._disk)
        except ProcessLookupError:
            return  # it has just died of something else: the fault is injected into its successor
        except OSError as error:
            self._pending.remove(fault)
            self.injections.append(Injection(fault, time.time(), look.generation, step, error=str(error)))
            return
        self._pending.remove(fault)
        if fault.about.ends_generation:
            self._struck_generation = look.generation
        one = _Underway(fault, blow, look.generation, step)
        self._underway.append(one)
        self._go_on(one, look)

    def _go_on(self, one: _Underway, look: ObservedRun) -> None:
        try:
            is_over = one.blow.tick(look)
        except OSError as error:
            is_over, one.is_told = True, True
            self.injections.append(Injection(one.fault, time.time(), one.generation, one.step, error=str(error)))
        if one.blow.injected_at is not None and not one.is_told:
            one.is_told = True
            step = step_of(look, one.fault) if look.generation == one.generation else one.step
            struck = Injection(one.fault, one.blow.injected_at, one.generation, step or one.step, one.blow.note)
            self.injections.append(struck)
        if not is_over:
            return
        try:
            one.blow.undo()
        except OSError:
            one.blow.is_urgent = False  # ``close`` tries again, and says what is wrong
            return
        self._underway.remove(one)
        if not one.is_told:  # the target was gone before the fault took effect
            self._pending.append(one.fault)
            self._struck_generation = min(self._struck_generation, one.generation - 1)

    def close(self) -> None:
        """Undo everything that was set up, apart from the effects of the faults. May be called more than once."""
        with ExitStack() as stack:  # all are tried, even if one fails
            if self._disk is not None:
                stack.callback(self._disk.close)
            for one in self._underway:
                stack.callback(one.blow.undo)

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

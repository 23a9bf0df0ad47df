"""Who strikes a run, and when?

The injector looks over the agent's shoulder: it is called at every turn of the agent's loop, in the agent's process,
outside the workers, which know nothing of it. Invariants: each fault strikes once; a fault that ends a generation
waits for the next one if this has been struck already, so that each has a recovery of its own; whatever was set up is
taken down by ``close``, however the run ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from closeranks.core.errors import SetupError
from closeranks.elastic.faults.blows import BLOWS, Blow
from closeranks.elastic.faults.disk import SmallDisk
from closeranks.elastic.faults.fault import Fault
from closeranks.elastic.faults.look import Look, Pace, is_due, paced, step_of
from closeranks.elastic.faults.means import lacking

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Strike:
    """What was done."""

    fault: Fault
    at: float
    """``time.time()``"""
    generation: int
    step: int
    """What the victim was at."""
    note: str = ""
    error: str = ""
    """Why it could not be done; empty where it was."""


@dataclass(slots=True)
class _Underway:
    fault: Fault
    blow: Blow
    generation: int
    step: int
    is_told: bool = False


class Injector:
    """Strikes with ``faults``. Call sequence: make it before the run starts, hand it to the agent, ``close`` it.

    ``checkpoints``: the folder that a fault ``diskfull`` means.
    """

    def __init__(self, faults: Sequence[Fault], checkpoints: Path | None = None) -> None:
        self._pending = list(faults)
        self._underway: list[_Underway] = []
        self._paces: dict[int, Pace] = {}
        self._struck_generation = -1
        self.strikes: list[Strike] = []
        for kind, reason in lacking(fault.kind for fault in faults).items():
            raise SetupError(f"the fault {kind} is not possible here: {reason}", "Leave it away, or run as root.")
        self._disk: SmallDisk | None = None
        self._is_open = False
        if checkpoints is not None and any(fault.kind == "diskfull" for fault in faults):
            self._disk = SmallDisk(checkpoints)

    def __call__(self, look: Look) -> float | None:
        """One turn; returns when (``time.monotonic()``) the next is wanted at the latest."""
        if not self._is_open:
            self._open(look)
        self._paces = paced(self._paces, look)
        for one in list(self._underway):
            self._go_on(one, look)
        for fault in list(self._pending):
            if self._may(fault, look) and is_due(fault, look, self._paces):
                self._begin(fault, look)
        if any(one.blow.is_hasty for one in self._underway):
            return look.now
        return time.monotonic() + _POLL_S if self._pending or self._underway else None

    def _open(self, look: Look) -> None:
        """The first turn comes before the first worker: what must be there before it is put there now."""
        self._is_open = True
        if self._disk is not None:
            try:
                self._disk.open()
            except OSError as error:
                self._give_up("diskfull", str(error), look)

    def _give_up(self, kind: str, why: str, look: Look) -> None:
        for fault in [fault for fault in self._pending if fault.kind == kind]:
            self._pending.remove(fault)
            self.strikes.append(Strike(fault, time.time(), look.generation, 0, error=why))

    @property
    def missed(self) -> tuple[Fault, ...]:
        """Those that have not struck."""
        return (*self._pending, *(one.fault for one in self._underway if not one.is_told))

    def _may(self, fault: Fault, look: Look) -> bool:
        return not fault.about.ends_generation or look.generation > self._struck_generation

    def _begin(self, fault: Fault, look: Look) -> None:
        step = step_of(look, fault) or 0
        try:
            blow = BLOWS[fault.kind](fault, look, self._disk)
        except ProcessLookupError:
            return  # it died of something else just now: its successor is struck
        except OSError as error:
            self._pending.remove(fault)
            self.strikes.append(Strike(fault, time.time(), look.generation, step, error=str(error)))
            return
        self._pending.remove(fault)
        if fault.about.ends_generation:
            self._struck_generation = look.generation
        one = _Underway(fault, blow, look.generation, step)
        self._underway.append(one)
        self._go_on(one, look)

    def _go_on(self, one: _Underway, look: Look) -> None:
        try:
            is_over = one.blow.turn(look)
        except OSError as error:
            is_over, one.is_told = True, True
            self.strikes.append(Strike(one.fault, time.time(), one.generation, one.step, error=str(error)))
        if one.blow.struck_at is not None and not one.is_told:
            one.is_told = True
            step = step_of(look, one.fault) if look.generation == one.generation else one.step
            struck = Strike(one.fault, one.blow.struck_at, one.generation, step or one.step, one.blow.note)
            self.strikes.append(struck)
        if not is_over:
            return
        try:
            one.blow.end()
        except OSError:
            one.blow.is_hasty = False  # ``close`` tries again, and says what is wrong
            return
        self._underway.remove(one)
        if not one.is_told:  # the victim was gone before the blow could fall
            self._pending.append(one.fault)
            self._struck_generation = min(self._struck_generation, one.generation - 1)

    def close(self) -> None:
        """Everything is as it was found, but for what the faults did. May be called again."""
        with ExitStack() as stack:  # one that fails does not keep the others from being tried
            if self._disk is not None:
                stack.callback(self._disk.close)
            for one in self._underway:
                stack.callback(one.blow.end)

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

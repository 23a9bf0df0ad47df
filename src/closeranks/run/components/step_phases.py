"""Records where the time of every step went on this rank, and what the rank sent.

A step lasts until the next begins: evaluations, saves and the user's own code after it count as its time, in phases of
their own. What came before the first step belongs to none.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from closeranks.core.events import Event, StepPhases
from closeranks.core.phases import GC, install_clock, switch
from closeranks.core.traffic import SentCounts, take_sent
from closeranks.run.components.component import Component
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.phase_clock import StepPhaseClock, make_phase_clock

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult


class PhaseRecorder(Component):
    def __init__(self, device: torch.device, config: TelemetryConfig) -> None:
        self._device, self._config = device, config
        self._clock: StepPhaseClock | None = None
        self._sent: deque[SentCounts] = deque()
        """Of the steps that have ended and are not measured yet."""
        self._thread = threading.get_ident()
        self._interrupted = ""
        """The phase in which a garbage collection began."""

    def begin(self, index: int) -> None:
        if self._clock is None:
            self._clock = make_phase_clock(self._device, self._config.nvtx)
            install_clock(self._clock)
            take_sent()
            self._thread = threading.get_ident()
            gc.callbacks.append(self._on_collection)
        else:
            self._end_step(index)

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        self._emit_measured(emit)

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        install_clock(None)
        if self._clock is not None:
            gc.callbacks.remove(self._on_collection)
            self._end_step(num_done)
            self._emit_measured(emit, wait=True)
            self._clock.close()

    def _end_step(self, step: int) -> None:
        assert self._clock is not None
        self._clock.end_step(step)
        self._sent.append(take_sent())

    def _on_collection(self, moment: str, info: dict[str, Any]) -> None:
        """Called by Python around every collection, whoever asked for it; the clock belongs to the training thread."""
        if threading.get_ident() != self._thread:
            return
        if moment == "start":
            self._interrupted = switch(GC)
        elif self._interrupted:
            switch(self._interrupted)

    def _emit_measured(self, emit: Callable[[Event], None], *, wait: bool = False) -> None:
        for measured in self._clock.pop(wait=wait) if self._clock else ():
            phases = {name: round(seconds, 7) for name, seconds in measured.phases.items()}
            sent, seconds = self._sent.popleft(), round(sum(measured.phases.values()), 7)
            emit(StepPhases(measured.step, seconds, phases, dict(sent.num_bytes), dict(sent.calls)))

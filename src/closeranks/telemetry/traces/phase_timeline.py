"""Notes when each phase of a few steps began, for the phases' own track in a trace.

It stands in front of the clock that measures the phases of all steps (``telemetry.phase_clock``) while steps are
traced. The times are those of the host: on an accelerator a phase begins here when the host begins to enqueue its work.

Invariant: the phases of a step add up to the step, which lasts until the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from closeranks.core.phases import OTHER, PhaseClock, install_clock, installed_clock


class PhaseTimeline:
    """Call sequence: ``begin_step`` for each step, then ``end``. Times are ``time.time_ns()``, the clock of traces."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._inner: PhaseClock | None = None
        self._step: tuple[int, int] | None = None
        self.steps: list[tuple[int, int, int]] = []
        """Each step: its number, its beginning and its end."""
        self.phases: list[tuple[int, str]] = []
        """When each phase began; it lasts until the next one."""

    def switch(self, phase: str) -> str:
        self.phases.append((self._clock_ns(), phase))
        return self._inner.switch(phase) if self._inner is not None else OTHER

    def begin_step(self, step: int) -> None:
        now_ns = self._end_step()
        if not self.phases:
            self.phases.append((now_ns, self._install()))
        self._step = step, now_ns

    def end(self) -> None:
        self._end_step()
        if self._inner is not None and installed_clock() is self:
            install_clock(self._inner)

    def _end_step(self) -> int:
        now_ns = self._clock_ns()
        if self._step is not None:
            self.steps.append((*self._step, now_ns))
            self._step = None
        return now_ns

    def _install(self) -> str:
        """Stand in front of the current clock; returns the phase it is in."""
        self._inner = installed_clock()
        if self._inner is None:
            return OTHER
        phase = self._inner.switch(OTHER)
        self._inner.switch(phase)
        install_clock(self)
        return phase

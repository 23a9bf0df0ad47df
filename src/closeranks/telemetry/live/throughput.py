"""Measures throughput, the share of the hardware's peak, and the remaining time of a run.

Throughput is items over wall-clock seconds of the latest steps. Invariants: a process's first step (warm-up, compile)
is in no figure; evaluation and saving are in no throughput, but they are in the remaining time. Pure: time comes in
with the events.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from closeranks.core.events import FlopsCounted, RunStarted, StepDone

_WINDOW_S = 5.0
_WINDOW_STEPS = 10
_TWO_SIDED_90 = 1.645
"""Standard deviations of a normal distribution."""


@dataclass(frozen=True, slots=True)
class MeterReading:
    """The figures of the run as of one step; None if not known yet, or not available."""

    step: int
    loss: float
    items_per_s: float | None
    mfu: float | None
    """Share of the vendor's dense peak of all devices."""
    peak_share: float | None
    """Share of what a large matrix product reached on this device, times the number of devices."""
    memory_bytes: int
    eta_s: float | None
    eta_error_s: float | None = None
    """With a probability of 90% the remaining time differs from ``eta_s`` by no more."""
    cost: str = ""
    """What the run has cost since this command began."""
    hfu: float | None = None
    """As ``mfu``, counting what is recomputed."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """A throughput as shares of the two peaks."""

    mfu: float | None
    peak_share: float | None
    hfu: float | None = None
    """None if nothing is recomputed: it would equal MFU."""


def efficiency(started: RunStarted, items_per_s: float) -> Efficiency:
    """Shares of the datasheet's and of the measured peak, None where the model's FLOPs or the peak is not known."""
    reached = items_per_s * started.flops_per_item / max(1, started.world_size)

    def over(peak: float | None) -> float | None:
        return reached / peak if peak and reached else None

    mfu = over(started.datasheet_flops)
    repeats = started.hardware_flops_per_item > started.flops_per_item > 0
    hfu = mfu * started.hardware_flops_per_item / started.flops_per_item if mfu and repeats else None
    return Efficiency(mfu, over(started.measured_flops), hfu)


def with_known_flops(started: RunStarted, before: RunStarted) -> RunStarted:
    """A later generation does not count FLOPs again: they are those of the one before."""
    if started.flops_per_item or not started.generation:
        return started
    return replace(
        started, flops_per_item=before.flops_per_item, hardware_flops_per_item=before.hardware_flops_per_item
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    items: int
    seconds: float


class ThroughputMeter:
    """Takes the steps of a run in order; call ``start_generation`` between two generations.

    The window holds the latest steps that make up five seconds, and at least ten steps, so that a fast run's figure
    does not flicker and a slow run's is not stale.
    """

    def __init__(self, started: RunStarted) -> None:
        self._started = started
        self._window: deque[_Timed] = deque()
        self._items = 0
        self._seconds = self._squares = 0.0
        self._num_steps = 0
        self._is_first = True
        self._pauses_s = self._steps_s = 0.0
        self._losses_s: list[float] = []

    def start_generation(self, started: RunStarted) -> None:
        """Other processes take over. Earlier measurements stay valid unless the number of processes changes."""
        if started.world_size != self._started.world_size:
            self._window.clear()
            self._items, self._seconds, self._squares = 0, 0.0, 0.0
        self._started, self._is_first = with_known_flops(started, self._started), True

    def note_flops(self, counted: FlopsCounted) -> None:
        self._started = counted.added_to(self._started)

    def observe(self, done: StepDone) -> MeterReading:
        self._num_steps += 1
        self._steps_s += done.seconds
        if not self._is_first:
            self._push(_Timed(done.items, done.seconds))
        self._is_first = False
        speed = self._items / self._seconds if self._seconds > 0 else None
        shares = efficiency(self._started, speed) if speed is not None else Efficiency(None, None)
        return MeterReading(
            step=done.step,
            loss=done.loss,
            items_per_s=speed,
            mfu=shares.mfu,
            peak_share=shares.peak_share,
            memory_bytes=done.memory_bytes,
            eta_s=self._eta(done.step),
            eta_error_s=self._eta_error(done.step),
            hfu=shares.hfu,
        )

    def pause(self, seconds: float) -> None:
        """An evaluation or a save between two steps, of which more are expected."""
        self._pauses_s += seconds

    def lose(self, seconds: float) -> None:
        """A fault cost so much time, of which more are expected."""
        self._losses_s.append(seconds)

    def _push(self, step: _Timed) -> None:
        self._window.append(step)
        self._items += step.items
        self._seconds += step.seconds
        self._squares += step.seconds**2
        while len(self._window) > _WINDOW_STEPS and self._seconds - self._window[0].seconds >= _WINDOW_S:
            oldest = self._window.popleft()
            self._items -= oldest.items
            self._seconds -= oldest.seconds
            self._squares -= oldest.seconds**2

    def _eta(self, step: int) -> float | None:
        remaining = self._started.last_step - step
        if remaining <= 0:
            return 0.0
        if not self._window:
            return None
        step_s = self._seconds / len(self._window)
        return remaining * (step_s + self._pauses_s / self._num_steps) * (1 + self._faults_per_s() * self._fault_s())

    def _eta_error(self, step: int) -> float | None:
        """From the spread of the latest steps, and from the number of faults so far; the two are independent."""
        remaining, num = self._started.last_step - step, len(self._window)
        if remaining <= 0 or num < 2:
            return None
        mean_s = self._seconds / num
        variance = max(0.0, self._squares - num * mean_s**2) / (num - 1)
        steps_variance = variance * (remaining + remaining**2 / num)
        num_faults = self._faults_per_s() * remaining * mean_s
        seen = len(self._losses_s)
        faults_variance = self._fault_s() ** 2 * (num_faults + num_faults**2 / seen) if seen else 0.0
        return _TWO_SIDED_90 * math.sqrt(steps_variance + faults_variance)

    def _faults_per_s(self) -> float:
        return len(self._losses_s) / self._steps_s if self._steps_s > 0 else 0.0

    def _fault_s(self) -> float:
        return sum(self._losses_s) / len(self._losses_s) if self._losses_s else 0.0

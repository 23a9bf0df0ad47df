"""Turns noisy measurements into curves to plot. Pure, without numpy.

Invariant: nothing is drawn that was not measured; values that are not finite leave a gap and have no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from closeranks.core.events import StepDone
from closeranks.telemetry.run_log.step_blocks import StepBlock

_MOST_POINTS = 2000
_LOG_RATIO = 30.0


@dataclass(frozen=True, slots=True)
class StepCurve:
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def finite(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if math.isfinite(value))


@dataclass(frozen=True, slots=True)
class AxisLimits:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Sums:
    """Prefix sums over the finite points, so that a window's sums cost two look-ups."""

    ones: tuple[float, ...]
    x: tuple[float, ...]
    y: tuple[float, ...]
    xx: tuple[float, ...]
    xy: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> _Sums:
        points = [(x, y) if math.isfinite(y) else None for x, y in enumerate(values)]
        return cls(
            ones=_running(1.0 if p else 0.0 for p in points),
            x=_running(p[0] if p else 0.0 for p in points),
            y=_running(p[1] if p else 0.0 for p in points),
            xx=_running(p[0] * p[0] if p else 0.0 for p in points),
            xy=_running(p[0] * p[1] if p else 0.0 for p in points),
        )

    def line_at(self, place: int, first: int, stop: int) -> float:
        """The least-squares line through the points of ``first:stop``, evaluated at ``place``."""
        ones, x, y, xx, xy = (sums[stop] - sums[first] for sums in (self.ones, self.x, self.y, self.xx, self.xy))
        if not ones:
            return math.nan
        spread = xx - x * x / ones
        slope = (xy - x * y / ones) / spread if spread > 1e-9 else 0.0
        return y / ones + slope * (place - x / ones)


def _running(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


def smooth_curve(curve: StepCurve) -> StepCurve:
    """A local linear fit over about a twentieth of the run around each step: no lag, and no bend at the ends.

    Clamped to the range of the values it was made from, so that a smooth loss is never below every loss. Evaluated at
    some two thousand steps of a long run: more would not be visible.
    """
    sums = _Sums.of(curve.values)
    num, half = len(curve.values), len(curve.values) // 40
    places = [*range(0, num - 1, math.ceil(num / _MOST_POINTS)), num - 1] if num else []
    means: list[float] = []
    for place in places:
        first, stop = max(0, place - half), min(num, place + half + 1)
        near = [value for value in curve.values[first : stop : _sparse(stop - first)] if math.isfinite(value)]
        mean = sums.line_at(place, first, stop)
        means.append(min(max(mean, min(near)), max(near)) if near and math.isfinite(mean) else math.nan)
    return StepCurve(tuple(curve.steps[place] for place in places), tuple(means))


def _sparse(length: int) -> int:
    """A stride that samples some fifty values of a window: bounding a smooth line needs no more."""
    return max(1, length // 50)


def downsample(curve: StepCurve, most: int = _MOST_POINTS) -> StepCurve:
    """At most about ``most`` points; each stretch keeps its lowest and highest, so that no spike is lost."""
    if len(curve.steps) <= most:
        return curve
    stride = math.ceil(2 * len(curve.steps) / most)
    kept: list[int] = []
    for first in range(0, len(curve.steps), stride):
        stretch = range(first, min(first + stride, len(curve.steps)))
        finite = [place for place in stretch if math.isfinite(curve.values[place])]
        if finite:
            kept += sorted({min(finite, key=curve.values.__getitem__), max(finite, key=curve.values.__getitem__)})
        else:
            kept.append(first)
    return StepCurve(tuple(curve.steps[place] for place in kept), tuple(curve.values[place] for place in kept))


def wants_log_scale(values: Iterable[float]) -> bool:
    """Whether the values span so much that a linear axis would show their end as a flat line."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0:
        return False
    return quantile(finite, 0.99) / quantile(finite, 0.01) > _LOG_RATIO


def axis_limits(raw: StepCurve, smooth: StepCurve, *, is_log: bool) -> AxisLimits | None:
    """An axis range that holds the smooth line and nearly all raw points; single spikes may be cut off, and what a
    log axis cannot show is."""
    means = smooth.finite()
    values = [value for value in raw.finite() if value > 0 or not is_log]
    if not values:
        return None
    low = min(quantile(values, 0.005), min(means))
    high = max(quantile(values, 0.995), max(means))
    if is_log:
        return AxisLimits(low / 1.15, high * 1.15)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return AxisLimits(low - margin, high + margin)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def rates(steps: Sequence[StepDone | StepBlock], window: int) -> StepCurve:
    """Items per second over the latest ``window`` steps, or blocks of steps, at each of them."""
    items, seconds = _running(step.items for step in steps), _running(step.seconds for step in steps)
    values: list[float] = []
    for stop in range(1, len(steps) + 1):
        first = max(0, stop - window)
        spent_s = seconds[stop] - seconds[first]
        values.append((items[stop] - items[first]) / spent_s if spent_s > 0 else math.nan)
    return StepCurve(tuple(step.step for step in steps), tuple(values))


def raw_curve(steps: Sequence[StepDone], blocks: Sequence[StepBlock], name: str) -> StepCurve:
    """A figure of every step; of each block its lowest and its highest value."""
    if not blocks:
        return StepCurve(tuple(step.step for step in steps), tuple(getattr(step, name) for step in steps))
    points = [(block, getattr(block, name)) for block in blocks]
    return StepCurve(
        tuple(step for block, _ in points for step in (block.first, block.last)),
        tuple(spread.get(end, math.nan) for _, spread in points for end in ("low", "high")),
    )


def mean_curve(steps: Sequence[StepDone], blocks: Sequence[StepBlock], name: str) -> StepCurve:
    """A figure of every step, or its mean in each block."""
    if not blocks:
        return raw_curve(steps, (), name)
    means = (getattr(block, name).get("mean", math.nan) for block in blocks)
    return StepCurve(tuple((block.first + block.last) // 2 for block in blocks), tuple(means))

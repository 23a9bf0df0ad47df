"""Draws a checkpoint policy as one picture: what it costs to save more or less often.

Left: the share of time lost against the interval, for three ways to save, each with its best interval marked. Right:
the effect of many jobs that share one store, and how the hazard of a preemptible machine changes with its age.
Invariant: the curves follow the formulas of the policy at every point, and matplotlib is imported only when a picture
is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from closeranks.facts.checkpoint_policy.multilevel import waste_at
from closeranks.facts.checkpoint_policy.preemption_hazard import hazards
from closeranks.facts.checkpoint_policy.save_interval import best_period_s, waste
from closeranks.facts.checkpoint_policy.storage_contention import SharedStorage
from closeranks.facts.durations import format_duration
from closeranks.plan.picture_style import INK, QUIET, style_axes
from closeranks.plan.policy import (
    HOUR_S,
    CheckpointPolicy,
    checkpoint_levels,
    multilevel_schedule_for,
    single_level,
)

_BLOCKING, _ASYNCHRONOUS, _TWO_LEVELS = "#c2601a", "#2b6cb0", "#2f7d5b"
_TICKS_S = (1, 10, 60, 600, 3600, 6 * 3600, 48 * 3600, 480 * 3600)
_NUM_POINTS = 240
_AXIS_FACTOR = 20
"""The axis extends to this multiple of the best interval, so that there is room for its label."""
_DPI = 130
_MAX_JOBS = 64


@dataclass(frozen=True, slots=True)
class WasteCurve:
    """The share of time lost by interval, and where it is least."""

    name: str
    color: str
    periods_s: tuple[float, ...]
    wastes: tuple[float, ...]
    best_s: float
    best_waste: float


def waste_curves(policy: CheckpointPolicy) -> tuple[WasteCurve, ...]:
    """Blocking and asynchronous saves to the place that outlives all failures; with two places, also both levels."""
    scenario = policy.situation
    blocking, asynchronous = (single_level(scenario, is_blocking=is_blocking) for is_blocking in (True, False))
    longest_s = max(6 * HOUR_S, *(_AXIS_FACTOR * best_period_s(level) for level in (blocking, asynchronous)))
    periods_s = _between(max(1.0, scenario.step_s), longest_s, _NUM_POINTS)
    found = []
    for name, color, level in (("blocking", _BLOCKING, blocking), ("asynchronous", _ASYNCHRONOUS, asynchronous)):
        best_s = best_period_s(level)
        wastes = tuple(waste(period_s, level) for period_s in periods_s)
        found.append(WasteCurve(name, color, periods_s, wastes, best_s, waste(best_s, level)))
    if len(policy.nesting.placed) > 1:
        storage = SharedStorage(scenario.transfer_s, scenario.num_jobs, policy.nesting.placed[-1].period_s)
        levels = checkpoint_levels(scenario, storage.random_s)
        wastes = tuple(waste_at(levels, period_s, scenario.stall_s) for period_s in periods_s)
        found.append(WasteCurve("two levels", _TWO_LEVELS, periods_s, wastes, policy.nesting.period_s, policy.waste))
    return tuple(found)


def _between(first: float, last: float, num: int) -> tuple[float, ...]:
    """Evenly spaced on a logarithmic scale."""
    return tuple(first * (last / first) ** (index / (num - 1)) for index in range(num))


def draw_policy(policy: CheckpointPolicy, path: Path) -> Path:
    """Draw a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 6.3))
    FigureCanvasAgg(figure)
    has_ages = bool(policy.ages)
    _draw_curves(figure.add_axes((0.062, 0.105, 0.53, 0.695)), policy)
    _draw_contention(figure.add_axes((0.685, 0.515 if has_ages else 0.105, 0.29, 0.285 if has_ages else 0.695)), policy)
    if has_ages:
        _draw_ages(figure.add_axes((0.685, 0.105, 0.29, 0.25)), policy)
    _draw_text(figure, policy)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=_DPI, facecolor="white", format="png")
    return unfinished.replace(path)


def _draw_text(figure: Any, policy: CheckpointPolicy) -> None:
    scenario = policy.situation
    title = f"Save every {format_duration(policy.nesting.period_s)}"
    if len(policy.nesting.placed) > 1:
        title += f", and to the store every {format_duration(policy.nesting.placed[-1].period_s)}"
    lost = f"{_percent(policy.waste)} of the time is lost"
    facts = (
        f"a failure every {format_duration(scenario.mtbf_s)}",
        f"{scenario.state_bytes / 1e9:,.3g} GB of state",
        f"{format_duration(scenario.stall_s)} of stall per save",
        f"{format_duration(scenario.restart_s)} to restart",
    )
    figure.text(0.062, 0.944, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.062, 0.898, "   ·   ".join(facts), fontsize=9.5, color=QUIET, va="center")
    figure.text(0.975, 0.944, lost, fontsize=13, fontweight="bold", color=INK, va="center", ha="right")
    again = f"{format_duration(policy.lost_s)} of work redone per failure"
    figure.text(0.975, 0.898, again, fontsize=9.5, color=QUIET, va="center", ha="right")


def _draw_curves(axes: Any, policy: CheckpointPolicy) -> None:
    curves = waste_curves(policy)
    least = min(curve.best_waste for curve in curves)
    for curve in curves:
        axes.plot(curve.periods_s, curve.wastes, color=curve.color, linewidth=2.2, label=curve.name, zorder=3)
        axes.plot(
            [curve.best_s], [curve.best_waste], "o", color=curve.color, markersize=8, mec="white", mew=1.4, zorder=5
        )
    for curve, offset in zip(curves, _label_offsets(curves), strict=True):
        axes.annotate(
            f"{curve.name}\n{format_duration(curve.best_s)}: {_percent(curve.best_waste)}",
            (curve.best_s, curve.best_waste),
            xytext=offset, textcoords="offset points", ha="center", va="center", fontsize=9.5, color=curve.color,
            fontweight="bold", linespacing=1.35, zorder=6,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
        )  # fmt: skip
    floor = policy.situation.restart_s / policy.situation.mtbf_s
    last_s, bottom = curves[0].periods_s[-1], max(min(0.7 * least, 0.8 * floor), 0.25 * least)
    if floor > bottom:
        axes.axhline(floor, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
        _note(axes, 0.94 * last_s, floor * 1.06, "restarts alone", QUIET, ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(curves[0].periods_s[0], last_s)
    axes.set_ylim(bottom, 1.0)
    ticks = [tick for tick in _TICKS_S if axes.get_xlim()[0] <= tick <= last_s]
    axes.set_xticks(ticks, [format_duration(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    shares = [share for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) if axes.get_ylim()[0] <= share]
    axes.set_yticks(shares, [f"{100 * share:g} %" for share in shares])
    axes.set_yticks([], minor=True)
    style_axes(axes, "time lost, by the interval between saves")


def _label_offsets(curves: Sequence[WasteCurve]) -> list[tuple[float, float]]:
    """Offsets from the marks, in points: the worst above its curve, the best below, so that no two overlap."""
    order = sorted(range(len(curves)), key=lambda index: -curves[index].best_waste)
    offsets = {order[0]: (0.0, 34.0), order[-1]: (0.0, -34.0)}
    for index in order[1:-1]:
        offsets[index] = (78.0, -24.0)
    return [offsets[index] for index in range(len(curves))]


def _draw_contention(axes: Any, policy: CheckpointPolicy) -> None:
    """How long a save to the store takes, by the number of jobs that share it, and the interval between saves."""
    scenario = policy.situation
    counts = range(1, max(_MAX_JOBS, scenario.num_jobs) + 1)
    periods_s = [multilevel_schedule_for(replace(scenario, num_jobs=count)).placed[-1].period_s for count in counts]
    shared = [SharedStorage(scenario.transfer_s, *pair) for pair in zip(counts, periods_s, strict=True)]
    labels = ("between a job's saves", "until stored, all jobs at once", "until stored, each at its own time")
    axes.plot(counts, periods_s, color=INK, linewidth=1.6, linestyle=(0, (1, 1.4)), label=labels[0])
    axes.plot(counts, [one.aligned_s for one in shared], color=_BLOCKING, linewidth=2.2, label=labels[1])
    axes.plot(counts, [one.random_s for one in shared], color=_ASYNCHRONOUS, linewidth=2.2, label=labels[2])
    for storage in shared:
        if storage.num_jobs == scenario.num_jobs:
            axes.plot(
                [storage.num_jobs], [storage.random_s], "o", color=_ASYNCHRONOUS, markersize=7, mec="white", mew=1.2
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**power for power in range(0, counts[-1].bit_length(), 2)]
    axes.set_xticks(ticks, [f"{tick} job{'' if tick == 1 else 's'}" if tick < 16 else str(tick) for tick in ticks])
    axes.set_xlim(1, counts[-1] * 1.02)
    bottom, top = 0.6 * scenario.transfer_s, 8.0 * periods_s[-1]
    axes.set_ylim(bottom, top)
    spans = [tick for tick in (1, 5, 30, 120, 600, 3600, 6 * 3600) if bottom <= tick <= top]
    axes.set_yticks(spans, [format_duration(tick) for tick in spans])
    axes.set_yticks([], minor=True)
    style_axes(axes, "many jobs, one store")
    axes.legend(loc="upper left", frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6, borderaxespad=0.1)


def _draw_ages(axes: Any, policy: CheckpointPolicy) -> None:
    starts_s, hazard = hazards()
    hours = [start_s / HOUR_S for start_s in starts_s]
    axes.fill_between(hours, hazard, 0.01, color="#e7eef6", linewidth=0)
    axes.plot(hours, hazard, color=_ASYNCHRONOUS, linewidth=2.0)
    for age in policy.ages:
        middle = (age.first_s + age.last_s) / 2 / HOUR_S
        if age.last_s - age.first_s > 12 * HOUR_S:
            _note(axes, middle, 0.09, f"save every {format_duration(age.period_s)}", ha="center")
    first, last = policy.ages[0], policy.ages[-1]
    _note(axes, 1.6, 4.4, f"first hour: {format_duration(first.period_s)}")
    _note(axes, 22.2, 12.0, f"last hour: {format_duration(last.period_s)}", ha="right")
    axes.set_yscale("log")
    axes.set_ylim(0.01, 60)
    axes.set_xlim(0, 24)
    axes.set_xticks((0, 6, 12, 18, 24), ("0", "6 h", "12 h", "18 h", "24 h"))
    axes.set_yticks((0.01, 0.1, 1, 10), ("0.01", "0.1", "1", "10"))
    axes.set_yticks([], minor=True)
    style_axes(axes, "hazard by a machine's age (mean = 1)")


def _note(axes: Any, x: float, y: float, text: str, color: str = INK, ha: str = "left") -> None:
    axes.text(x, y, text, fontsize=8.5, color=color, ha=ha, va="bottom")


def _percent(share: float) -> str:
    """24 %, 7.5 %, 2.0 %, 0.34 %."""
    percent = 100 * share
    if percent >= 9.95:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.95 else f"{percent:.2g} %"

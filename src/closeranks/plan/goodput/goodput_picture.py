"""Draws forecasts of goodput as one picture: what spares are worth, and where the time goes.

Left: goodput by the number of spares for each strategy, with the middle half of the runs, and below it what is paid
for per device-hour that trained the model. Right: the losses of each strategy with its chosen number of spares.
Invariant: every point is a simulated one, and matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.facts.durations import format_duration
from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.plan.goodput.forecast import SpareSweep
from closeranks.plan.goodput.goodput_text import percent
from closeranks.plan.goodput.time_rows import (
    DETECTION,
    MISSING,
    RECOVERY,
    REDONE,
    ROW_WORDS,
    SAVE,
    SNAPSHOT,
    STRAGGLER,
    USEFUL,
    WAITING,
)
from closeranks.plan.picture_style import INK, QUIET, style_axes

_STRATEGIES = ("#2b6cb0", "#c2601a", "#2f7d5b")
_ROWS = {
    STRAGGLER: "#8d6bb8",
    SNAPSHOT: "#9db8d2",
    SAVE: "#4f7cac",
    REDONE: "#c2601a",
    DETECTION: "#e0a458",
    RECOVERY: "#b33951",
    WAITING: "#5c6770",
    MISSING: "#a9b4bf",
}
_LABELLED = 0.08
"""Parts of a bar that are at least this share of the axis carry their figure."""
_DPI = 130


def draw_goodput(sweeps: Sequence[SpareSweep], table: FailureTable, path: Path) -> Path:
    """Draw a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 6.3))
    FigureCanvasAgg(figure)
    _draw_goodput(figure.add_axes((0.062, 0.475, 0.41, 0.335)), sweeps)
    _draw_paid(figure.add_axes((0.062, 0.105, 0.41, 0.255)), sweeps)
    _draw_losses(figure.add_axes((0.555, 0.105, 0.42, 0.705)), sweeps)
    _draw_text(figure, sweeps, table)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=_DPI, facecolor="white", format="png")
    return unfinished.replace(path)


def _draw_text(figure: Any, sweeps: Sequence[SpareSweep], table: FailureTable) -> None:
    chosen = [sweep.chosen for sweep in sweeps]
    scenario, mtbf_s = chosen[0].scenario, table.mtbf_s(chosen[0].scenario.num_devices)
    title = ",  ".join(f"{found.strategy.name} {percent(found.goodput.median)}" for found in chosen)
    facts = (
        f"{scenario.num_devices:,} devices",
        format_duration(scenario.wall_s),
        "no failures" if math.isinf(mtbf_s) else f"a failure every {format_duration(mtbf_s)}",
        f"steps of {format_duration(scenario.step_s)}",
    )
    figure.text(0.062, 0.944, f"Goodput: {title}", fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.062, 0.898, "   ·   ".join(facts), fontsize=9.5, color=QUIET, va="center")


def _numbers(sweep: SpareSweep) -> list[int]:
    return [found.scenario.spares for found in sweep.forecasts]


def _draw_goodput(axes: Any, sweeps: Sequence[SpareSweep]) -> None:
    for sweep, color in zip(sweeps, _STRATEGIES, strict=False):
        goodputs = [found.goodput for found in sweep.forecasts]
        axes.fill_between(
            _numbers(sweep), [one.low for one in goodputs], [one.high for one in goodputs], color=color, alpha=0.2, lw=0
        )
        axes.plot(
            _numbers(sweep), [one.median for one in goodputs], color=color, lw=2.2, marker="o", ms=3.5,
            label=sweep.strategy.name,
        )  # fmt: skip
        _mark(axes, sweep.chosen.scenario.spares, sweep.chosen.goodput.median, color)
    least = min(found.goodput.low for sweep in sweeps for found in sweep.forecasts)
    bottom = max(0.0, least - 0.1 * (1 - least))
    axes.set_ylim(bottom, 1.0 + 0.03 * (1 - bottom))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6)
    style_axes(axes, "goodput by hosts that stand by; bands hold the middle half of the runs")


def _draw_paid(axes: Any, sweeps: Sequence[SpareSweep]) -> None:
    best = min(sweep.best.hours_per_useful for sweep in sweeps)
    worst = max(sweep.best.hours_per_useful for sweep in sweeps)
    top = worst + max(0.06, 1.5 * (worst - best)) if math.isfinite(worst) else 2.0
    for sweep, color in zip(sweeps, _STRATEGIES, strict=False):
        axes.plot(
            _numbers(sweep), [min(found.hours_per_useful, 100.0) for found in sweep.forecasts], color=color, lw=2.2,
            marker="o", ms=3.5,
        )  # fmt: skip
        _mark(axes, sweep.best.scenario.spares, sweep.best.hours_per_useful, color)
    axes.set_ylim(1.0, top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("spare hosts", fontsize=8.5, color=QUIET)
    style_axes(axes, "device-hours paid per useful one; the dot is the number of spares that pays")


def _mark(axes: Any, x: float, y: float, color: str) -> None:
    axes.plot([x], [min(y, 100.0)], "o", color=color, markersize=9, mec="white", mew=1.4, zorder=5)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_losses(axes: Any, sweeps: Sequence[SpareSweep]) -> None:
    """One bar for each strategy, as long as what it loses."""
    longest = max(1 - sweep.chosen.shares[USEFUL] for sweep in sweeps) or 1.0
    used = [row for row in _ROWS if any(sweep.chosen.shares[row] > 1e-6 for sweep in sweeps)]
    for place, sweep in enumerate(sweeps):
        begin = 0.0
        for row in used:
            share = sweep.chosen.shares[row]
            axes.barh(place, share, left=begin, height=0.42, color=_ROWS[row], edgecolor="white", lw=0.6)
            if share >= _LABELLED * longest:
                axes.text(
                    begin + share / 2, place, percent(share), ha="center", va="center", fontsize=8.5, color="white"
                )
            begin += share
        spares = sweep.chosen.scenario.spares
        name = f"{sweep.strategy.name}, {spares} spare{'' if spares == 1 else 's'}"
        axes.text(0, place - 0.29, name, fontsize=10, fontweight="bold", color=INK, va="bottom")
        lost_s = begin * sweep.chosen.scenario.wall_s
        axes.text(
            1.02 * begin,
            place,
            f"{percent(begin)} lost\n{format_duration(lost_s)}",
            fontsize=9,
            color=INK,
            va="center",
        )
    axes.set_xlim(0, 1.22 * longest)
    axes.set_ylim(len(sweeps) - 0.1 + 0.16 * len(used), -0.5)
    for number, row in enumerate(used):
        height = len(sweeps) - 0.28 + 0.16 * number
        axes.barh(height, 0.028 * longest, height=0.09, color=_ROWS[row])
        axes.text(0.045 * longest, height, ROW_WORDS[row], fontsize=9, color=INK, va="center")
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    style_axes(axes, "where the lost time goes, as a share of workers times wall time")
    axes.grid(False, axis="y")

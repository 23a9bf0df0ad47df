"""What did a soak look like? Steps a second over time, with a mark for every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from soak_figures import Cost, Course
from soak_plan import Plan

_INK, _QUIET, _GRID, _BLUE, _GREEN = "#1f2933", "#7b8794", "#e6eaef", "#2563a8", "#2f855a"
_MARKS = ("#c53030", "#e07b28", "#7c4d9e", "#0f766e", "#b7791f", "#2b6cb0", "#97266d", "#4a5568", "#276749", "#744210")
_BINS = 120
_LEAST_BIN_S = 2.0


def draw(course: Course, plan: Plan, found: Sequence[Cost], made: Mapping[str, Any], path: Path, title: str) -> None:
    kinds = sorted({one.struck.kind for one in found})
    figure = Figure(figsize=(11, 4.2 + 0.22 * len(kinds)))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 1, height_ratios=(3.0, 0.3 + 0.25 * len(kinds)), left=0.09, right=0.97, top=0.86, bottom=0.1, hspace=0.08
    )
    rates, marks = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    for axes in (rates, marks):
        _tidy(axes, plan)
    _draw_rates(rates, course, plan, made)
    _draw_marks(marks, found, kinds)
    figure.text(0.09, 0.945, title, fontsize=14, fontweight="bold", color=_INK, va="center")
    words = f"{made['ratio']:.1%} of undisturbed steps, {len(found)} faults, {made['step_s']:.2f} s a step"
    figure.text(0.09, 0.9, words, fontsize=9.5, color=_QUIET, va="center")
    figure.savefig(path, dpi=140, facecolor="white", format="png")


def _tidy(axes: Any, plan: Plan) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3cbd4")
    axes.tick_params(colors=_QUIET, labelsize=8.5, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, plan.ends_s / 60)
    for window in plan.windows:
        if not window.is_storm:
            axes.axvspan(window.begins_s / 60, window.ends_s / 60, color="#edf7ee", zorder=0, linewidth=0)


def _draw_rates(axes: Any, course: Course, plan: Plan, made: Mapping[str, Any]) -> None:
    """A step that ends in the next bin belongs to both: an empty bin shows a standstill, not a long step."""
    bin_s = max(_LEAST_BIN_S, plan.ends_s / _BINS)
    edges = [place * bin_s for place in range(int(plan.ends_s / bin_s) + 1)]
    values = [course.rate(first, last) for first, last in pairwise(edges)]
    axes.stairs(values, [edge / 60 for edge in edges], color=_BLUE, linewidth=1.3, label=f"every {bin_s:.0f} s")
    calms = [window for window in plan.windows if not window.is_storm]
    for place, (calm, rate) in enumerate(zip(calms, made["calm_steps_per_s"], strict=True)):
        label = "undisturbed" if place == 0 else None
        axes.plot([calm.begins_s / 60, calm.ends_s / 60], [rate, rate], color=_GREEN, linewidth=2.4, label=label)
    axes.set_ylim(0, 1.25 * max([*values, *made["calm_steps_per_s"]]))
    axes.set_ylabel("steps a second", fontsize=9, color=_QUIET)
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="upper right", ncols=2)


def _draw_marks(axes: Any, found: Sequence[Cost], kinds: Sequence[str]) -> None:
    for row, kind in enumerate(kinds):
        times = [one.struck.at_s / 60 for one in found if one.struck.kind == kind]
        axes.plot(times, [row] * len(times), "|", color=_MARKS[row % len(_MARKS)], markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.4, -0.6)
    axes.set_xlabel("minutes", fontsize=9, color=_QUIET)

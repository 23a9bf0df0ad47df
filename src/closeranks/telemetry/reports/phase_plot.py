"""Draws where the time of the steps went: over the run, and for each rank.

Drawn from the run folder alone, in any process. Invariant: what is stacked adds up to the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from closeranks.core import phases
from closeranks.core.events import StepPhases
from closeranks.telemetry import formatting
from closeranks.telemetry.reports.plot_style import (
    BLUE,
    GRAY,
    GREEN,
    LIGHT_BLUE,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    YELLOW,
    new_figure,
    save_figure,
    tidy,
)
from closeranks.telemetry.run_log.phase_history import PhaseHistory, load_phases
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import load_history

_MOST_BINS = 200
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class _Layer:
    """Phases that are drawn as one colour."""

    label: str
    color: str
    holds: Callable[[str], bool]


def _one_of(*names: str) -> Callable[[str], bool]:
    return frozenset(names).__contains__


LAYERS = (
    _Layer("forward", BLUE, _one_of(phases.FORWARD)),
    _Layer("backward", LIGHT_BLUE, _one_of(phases.BACKWARD)),
    _Layer("optimizer", GREEN, _one_of(phases.OPTIMIZER)),
    _Layer("waiting for ranks", RED, lambda name: "." in name or name in (phases.VOTE, phases.OUTER_STEP)),
    _Layer("data", ORANGE, _one_of(phases.DATA, phases.HOST_TO_DEVICE)),
    _Layer("snapshots, saves", PURPLE, _one_of(phases.SNAPSHOT, phases.SAVE)),
    _Layer("evaluation", YELLOW, _one_of(phases.EVALUATION)),
    _Layer("everything else", PALE, lambda name: True),
)
"""The first layer that holds a phase takes it."""


def draw_phases(folder: Path) -> Path | None:
    """Draw ``phases.png`` into the run folder; None if no phases were recorded."""
    run, history = RunFolder(folder), load_phases(folder)
    first_steps = load_history(folder).first_steps
    counted = history.means(first_steps)
    if not counted:
        return None
    return save_figure(_figure(history, counted), run.phase_plot)


def stacked(steps: Sequence[StepPhases]) -> list[float]:
    """Mean milliseconds per step in each layer; they add up to the mean step."""
    totals = [0.0] * len(LAYERS)
    for one in steps:
        for name, spent in one.phases.items():
            totals[next(number for number, layer in enumerate(LAYERS) if layer.holds(name))] += spent
    return [1000 * total / max(1, len(steps)) for total in totals]


def binned(counted: Mapping[int, Sequence[StepPhases]], most: int = _MOST_BINS) -> list[tuple[float, list[float]]]:
    """For each bin of neighbouring steps: its middle step, and the layers in the mean of all ranks."""
    by_step: dict[int, list[StepPhases]] = {}
    for own in counted.values():
        for one in own:
            by_step.setdefault(one.step, []).append(one)
    steps = sorted(by_step)
    width = -(-len(steps) // most)
    bins = [steps[first : first + width] for first in range(0, len(steps), width)]
    return [(fmean(inside), stacked([one for step in inside for one in by_step[step]])) for inside in bins]


def _figure(history: PhaseHistory, counted: Mapping[int, Sequence[StepPhases]]) -> Any:
    shown = dict(list(counted.items())[:_MOST_RANKS])
    figure = new_figure(3.6 + 0.24 * len(shown))
    grid = figure.add_gridspec(
        2, 1, height_ratios=(2.4, 0.35 + 0.24 * len(shown)), left=0.07, right=0.79, top=0.9, bottom=0.1, hspace=0.55
    )
    above, below = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    rows = binned(counted)
    used = [number for number in range(len(LAYERS)) if any(row[1][number] > 0 for row in rows)]
    _draw_steps(above, rows, used)
    _draw_ranks(below, shown, used)
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(0.8, 0.9), frameon=False, fontsize=8.5)
    if len(history.steps) > len(shown):
        below.set_xlabel(f"ms per step; the first {len(shown)} of {len(history.steps)} ranks", fontsize=8.5, color=GRAY)
    return figure


def _draw_steps(axes: Any, rows: Sequence[tuple[float, list[float]]], used: Sequence[int]) -> None:
    steps = [step for step, _ in rows]
    layers = [[values[number] for _, values in rows] for number in used]
    labels, colors = [LAYERS[number].label for number in used], [LAYERS[number].color for number in used]
    if len(steps) == 1:  # an area needs two points
        steps, layers = [steps[0] - 0.5, steps[0] + 0.5], [2 * layer for layer in layers]
    axes.stackplot(steps, layers, labels=labels, colors=colors, linewidth=0)
    axes.set_xlim(steps[0], steps[-1])
    tidy(axes, "time of a step, in the mean of all ranks (ms)")
    axes.xaxis.set_major_formatter(lambda value, _: formatting.tick(value))
    axes.set_xlabel("step", fontsize=8.5, color=GRAY, labelpad=2)


def _draw_ranks(axes: Any, counted: Mapping[int, Sequence[StepPhases]], used: Sequence[int]) -> None:
    names = [f"rank {rank}" for rank in counted]
    lefts = [0.0] * len(names)
    per_rank = [stacked(own) for own in counted.values()]
    for number in used:
        widths = [values[number] for values in per_rank]
        axes.barh(names, widths, left=lefts, color=LAYERS[number].color, height=0.72)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    tidy(axes, "each rank, in the mean of all steps (ms)")
    axes.tick_params(axis="y", length=0)

"""Draws what the memory of the ranks is used for: over the run on rank 0, and for each rank.

Drawn from the run folder alone, in any process. Invariant: what is stacked adds up to the memory in use (on an
accelerator the peak so far); what has no kind is a layer of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.core.events import MemoryUsed
from closeranks.facts.devices import is_cpu
from closeranks.telemetry import formatting
from closeranks.telemetry.reports.plot_style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    LIGHT_BLUE,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SMALL,
    YELLOW,
    new_figure,
    save_figure,
    tidy,
)
from closeranks.telemetry.reports.resource_section import KIND_WORDS
from closeranks.telemetry.run_log.resource_history import ResourceHistory, load_resources
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import RunHistory, load_history

COLORS = {
    "parameters": BLUE,
    "gradients": LIGHT_BLUE,
    "optimizer": GREEN,
    "buffers": YELLOW,
    "activations": ORANGE,
    "workspace": RED,
}
"""Kinds on the device; snapshots lie in the host's memory, and are drawn beside them."""
_REST = "rest"
_MOST_POINTS = 400
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of one rank, in bytes."""

    rank: int
    kinds: Mapping[str, float]
    """On the device; they add up to ``peak_bytes`` unless the kinds alone are more."""
    snapshot_bytes: float
    peak_bytes: float


def draw_memory(folder: Path) -> Path | None:
    """Draw ``memory.png`` into the run folder; None if no memory was recorded by kind."""
    resources, history = load_resources(folder), load_history(folder)
    if not resources.measured or not history.steps:
        return None
    return save_figure(_figure(resources, history), RunFolder(folder).memory_plot)


def layers_over_steps(history: RunHistory, measured: Sequence[MemoryUsed]) -> tuple[list[int], dict[str, list[float]]]:
    """Steps, and the bytes of each kind at each of them, by what was measured last until then (before the first
    measurement, by that)."""
    points = _thinned([(one.step, one.memory_bytes) for one in history.counted])
    steps, starts = [step for step, _ in points], [one.step for one in measured]
    kinds = [measured[max(0, bisect_right(starts, step) - 1)].kinds for step in steps]
    layers = {name: [float(one.get(name, 0)) for one in kinds] for name in COLORS}
    layers[_REST] = [
        max(0.0, used - sum(one.get(name, 0) for name in COLORS)) for (_, used), one in zip(points, kinds, strict=True)
    ]
    return steps, {name: values for name, values in layers.items() if any(values)}


def _thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The highest of each stretch of steps."""
    width = -(-len(points) // _MOST_POINTS) or 1
    stretches = (points[first : first + width] for first in range(0, len(points), width))
    return [(stretch[-1][0], max(used for _, used in stretch)) for stretch in stretches]


def memory_rows(resources: ResourceHistory) -> list[MemoryRow]:
    """All ranks whose memory was recorded, as measured last."""
    rows = []
    for rank, own in sorted(resources.measured.items()):
        last, peak = own[-1], max(one.peak_bytes for one in own)
        kinds = {name: float(last.kinds[name]) for name in COLORS if last.kinds.get(name)}
        if peak > sum(kinds.values()):
            kinds[_REST] = peak - sum(kinds.values())
        rows.append(MemoryRow(rank, kinds, float(last.kinds.get("snapshots", 0)), peak))
    return rows


def _figure(resources: ResourceHistory, history: RunHistory) -> Any:
    rows = memory_rows(resources)
    shown = sorted(sorted(rows, key=lambda row: -row.peak_bytes)[:_MOST_RANKS], key=lambda row: row.rank)
    figure = new_figure(3.6 + 0.24 * len(shown))
    grid = figure.add_gridspec(
        2, 1, height_ratios=(2.4, 0.35 + 0.24 * len(shown)), left=0.08, right=0.77, top=0.9, bottom=0.11, hspace=0.6
    )
    above, below = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    device = history.started.device if history.started is not None else ""
    rank = min(resources.measured)
    _draw_steps(above, history, rank, resources.measured[rank])
    _draw_ranks(below, shown, "resident set" if is_cpu(device) else "peak", len(rows))
    _legend(figure, above, below, is_cpu(device))
    return figure


def _draw_steps(axes: Any, history: RunHistory, rank: int, measured: Sequence[MemoryUsed]) -> None:
    steps, layers = layers_over_steps(history, measured)
    if len(steps) == 1:  # an area needs two points
        steps, layers = [steps[0], steps[0] + 1], {name: 2 * values for name, values in layers.items()}
    colors = [COLORS.get(name, PALE) for name in layers]
    axes.stackplot(steps, layers.values(), labels=list(layers), colors=colors, linewidth=0)
    total = max((one.total_bytes for one in measured), default=0)
    tidy(axes, f"memory of rank {rank}, by kind", f"of {formatting.size(total)}" if total else "")
    axes.set_xlim(steps[0], steps[-1])
    _in_bytes(axes.yaxis, axes.get_ylim()[1])
    axes.xaxis.set_major_formatter(lambda value, _: formatting.tick(value))
    axes.set_xlabel("step", fontsize=SMALL, color=GRAY, labelpad=2)


def _draw_ranks(axes: Any, rows: Sequence[MemoryRow], what: str, num_ranks: int) -> None:
    names = [f"rank {row.rank}" for row in rows]
    lefts = [0.0] * len(rows)
    for name in (*COLORS, _REST):
        widths = [row.kinds.get(name, 0.0) for row in rows]
        if any(widths):
            axes.barh(names, widths, left=lefts, color=COLORS.get(name, PALE), height=0.72, label=name)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    if any(row.snapshot_bytes for row in rows):
        widths = [row.snapshot_bytes for row in rows]
        axes.barh(
            names, widths, left=lefts, height=0.72, label="snapshots", color="white", edgecolor=PURPLE, hatch="////",
            linewidth=0.8,
        )  # fmt: skip
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for name, left, row in zip(names, lefts, rows, strict=True):
        label = (left, name)
        axes.annotate(
            formatting.size(row.peak_bytes), label, xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=SMALL - 0.5, color=GRAY,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(lefts, default=0.0) or 1.0)
    of_all = f"; the {len(rows)} of {num_ranks} ranks that use most" if num_ranks > len(rows) else ""
    tidy(axes, f"each rank, as measured last; the figure is its {what}{of_all}")
    axes.tick_params(axis="y", length=0)
    _in_bytes(axes.xaxis, axes.get_xlim()[1])


def _in_bytes(axis: Any, high: float) -> None:
    """Ticks at round numbers of the unit in which the figures are shown."""
    from matplotlib.ticker import MaxNLocator

    unit = 1024.0 ** min(3, max(0, int(high).bit_length() - 1) // 10)
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / unit)
    axis.set_ticks([unit * tick for tick in ticks if tick * unit <= high])
    axis.set_major_formatter(lambda value, _: formatting.size(value))


def _legend(figure: Any, above: Any, below: Any, is_on_cpu: bool) -> None:
    found: dict[str, Any] = {}
    for axes in (above, below):
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    rest = "Python, torch and\nfreed memory" if is_on_cpu else "everything else"
    words = {
        **KIND_WORDS,
        _REST: rest,
        "workspace": "workspace and\ncommunication",
        "snapshots": "snapshots, on\nthe host",
    }
    order = [name for name in (*COLORS, _REST, "snapshots") if name in found]
    figure.legend(
        [found[name] for name in order[::-1]], [words[name] for name in order[::-1]], loc="upper left",
        bbox_to_anchor=(0.78, 0.9), frameon=False, fontsize=SMALL, labelcolor=INK,
    )  # fmt: skip

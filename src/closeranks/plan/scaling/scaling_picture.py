"""Draws how a job scales: throughput against devices, and what a step's time goes into.

Invariant: every point is one of the text's rows, and matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.plan.picture_style import INK, QUIET, legend_below, new_figure, round_ticks, save_png, style_axes
from closeranks.plan.scaling.scaling import ScaleCurve, ScalePoint
from closeranks.plan.search.part_kinds import COLORS, time_by_kind
from closeranks.plan.search.plan_text import count_text

_LINES = {"strong": (INK, "o", 2.2), "weak": ("#c026a0", "s", 1.4)}
_SHOWN = 0.004


def draw_scaling(title: str, curves: Sequence[ScaleCurve], noun: str, seq_len: int, path: Path) -> Path:
    """Draw a PNG. ``noun``: what throughput counts, tokens or samples."""
    return save_png(scaling_figure(title, curves, noun, seq_len), path)


def scaling_figure(title: str, curves: Sequence[ScaleCurve], noun: str, seq_len: int) -> Any:
    figure = new_figure(title, (14.0, 6.0))
    grid = figure.add_gridspec(2, 3, width_ratios=(1.5, 1.0, 1.0), height_ratios=(1.0, 0.01))
    _throughput(figure.add_subplot(grid[0, 0]), curves, noun, seq_len)
    drawn: dict[str, Any] = {}
    for place, curve in enumerate(curves, 1):
        axes = figure.add_subplot(grid[0, place])
        drawn |= _shares(axes, curve)
        style_axes(axes, f"{curve.kind} scaling: share of a step")
        axes.grid(False, axis="x")
    legend_below(figure.add_subplot(grid[1, 1:]), [drawn[kind] for kind in COLORS if kind in drawn], 4)
    return figure


def _planned(curve: ScaleCurve) -> list[ScalePoint]:
    return [point for point in curve.points if point.plan is not None]


def _throughput(axes: Any, curves: Sequence[ScaleCurve], noun: str, seq_len: int) -> None:
    every: list[float] = []
    for curve in curves:
        points = _planned(curve)
        counts = [point.num_devices for point in points]
        rates = [point.global_batch * seq_len / point.plan.step.seconds for point in points if point.plan is not None]
        color, marker, width = _LINES[curve.kind]
        axes.plot(counts, rates, color=color, lw=width, marker=marker, ms=4.5, label=f"{curve.kind} scaling")
        if rates:
            ideal = [rates[0] * count / counts[0] for count in counts]
            axes.plot(counts, ideal, color=color, lw=0.8, ls="--", zorder=1)
        every += rates
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _device_ticks(axes, [point.num_devices for point in curves[0].points])
    if every:
        round_ticks(axes.yaxis, min(every), max(every))
    axes.yaxis.set_major_formatter(lambda value, _: count_text(value))
    axes.set_xlabel("devices", fontsize=8.5, color=QUIET)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    style_axes(axes, f"{noun} per second; dashed: linear from the smallest")


def _device_ticks(axes: Any, counts: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=0 if len(counts) <= 10 else 60)
    axes.xaxis.set_minor_locator(NullLocator())


def _shares(axes: Any, curve: ScaleCurve) -> dict[str, Any]:
    """A bar per number of devices; what is drawn for each kind."""
    rows = [{} if point.plan is None else time_by_kind(point.plan) for point in curve.points]
    totals = [sum(row.values()) for row in rows]
    below = [0.0] * len(rows)
    found = {}
    for kind, color in COLORS.items():
        shares = [row.get(kind, 0.0) / total if total else 0.0 for row, total in zip(rows, totals, strict=True)]
        if max(shares) > 0:
            drawn = axes.bar(range(len(rows)), shares, bottom=below, width=0.75, color=color, label=kind)
            below = [low + share for low, share in zip(below, shares, strict=True)]
            if max(shares) > _SHOWN:
                found[kind] = drawn
    for place, total in enumerate(totals):
        if not total:
            axes.text(place, 0.5, "nothing fits", rotation=90, ha="center", va="center", fontsize=8.5, color=QUIET)
    axes.set_xticks(range(len(rows)), [f"{point.num_devices:,}" for point in curve.points], rotation=60)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    return found

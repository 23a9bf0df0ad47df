"""Plots the lengths of data sets: one picture, with a panel for each data set.

A bar per doubling of the length, with median and p95 marked. Invariant: matplotlib is imported only when a picture is
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.cli.data.stats_text import NamedStats

_INK, _QUIET, _GRID, _BAR, _MARK = "#1f2933", "#7b8794", "#dfe4ea", "#2b6cb0", "#c2601a"
_DPI = 130
_LABELS = 20
"""Maximum bars that have room for a label each."""


def draw_lengths(found: Sequence[NamedStats], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6 * len(found) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, one in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        _draw_one(axes, one)
    figure.savefig(path, dpi=_DPI)


def _draw_one(axes: Any, stats: NamedStats) -> None:
    lengths = stats.stats.lengths
    bars = lengths.bars()
    axes.set_title(f"{stats.name}: {stats.headline()}", loc="left", fontsize=10, color=_INK)
    axes.bar(range(len(bars)), [bar.count for bar in bars], width=0.92, color=_BAR, zorder=2)
    names = [_short(bar.first) if bar.last - bar.first == 1 else f"{_short(bar.first)}+" for bar in bars]
    every = 1 if len(bars) <= _LABELS else 2
    axes.set_xticks(range(0, len(bars), every), names[::every], fontsize=8)
    axes.set_xlabel(f"{stats.unit} of a {stats.noun[:-1]}", fontsize=9, color=_INK)
    axes.set_ylabel(stats.noun, fontsize=9, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.margins(y=0.28)
    axes.grid(axis="y", color=_GRID, zorder=0)
    axes.tick_params(colors=_QUIET, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if not lengths.count:
        return
    for share, name, height in ((0.5, "median", 0.97), (0.95, "p95", 0.89)):
        length = lengths.quantile(share)
        x = _position(length, [bar.first for bar in bars])
        axes.axvline(x, color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
        label = f" {name} {length:,.0f} "
        side = "left" if x < len(bars) * 0.7 else "right"
        axes.text(x, height, label, transform=axes.get_xaxis_transform(), ha=side, va="top", fontsize=8, color=_MARK)


def _position(length: float, firsts: Sequence[int]) -> float:
    """The position of a length on an axis with a bar per doubling."""
    number = max(index for index, first in enumerate(firsts) if first <= length)
    first = firsts[number]
    return number - 0.46 + 0.92 * (length - first) / max(first, 1) if first > 1 else float(number)


def _short(value: int) -> str:
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if value >= unit:
            return f"{value // unit}{name}"
    return str(value)

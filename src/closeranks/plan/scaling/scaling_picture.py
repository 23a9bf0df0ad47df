"""Draws how a job scales: throughput against devices, and what a step's time goes into.

Invariant: every point is one of the text's rows, and matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.plan.picture_style import INK, QUIET, style_axes
from closeranks.plan.scaling.scaling import ScaleCurve, ScalePoint
from closeranks.plan.search.plan_text import count_text

_COLORS = {"strong": "#2b6cb0", "weak": "#2f7d5b"}
_SHARES = (("computing", "#9db8d2"), ("bubble", "#e0a458"), ("communication", "#c2601a"))
_DPI = 130


def draw_scaling(title: str, curves: Sequence[ScaleCurve], seq_len: int, path: Path) -> Path:
    """Draw a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 5.4))
    FigureCanvasAgg(figure)
    figure.text(0.06, 0.945, title, fontsize=13, fontweight="bold", color=INK, va="center")
    _throughput(figure.add_axes((0.06, 0.12, 0.40, 0.70)), curves, seq_len)
    for place, curve in enumerate(curves):
        axes = figure.add_axes((0.53 + 0.24 * place, 0.12, 0.205, 0.70))
        _shares(axes, curve)
        style_axes(axes, f"{curve.kind} scaling: share of a step")
        axes.grid(False, axis="x")
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=_DPI, facecolor="white", format="png")
    return unfinished.replace(path)


def _planned(curve: ScaleCurve) -> list[ScalePoint]:
    return [point for point in curve.points if point.plan is not None]


def _throughput(axes: Any, curves: Sequence[ScaleCurve], seq_len: int) -> None:
    for curve in curves:
        points = _planned(curve)
        counts = [point.num_devices for point in points]
        rates = [point.global_batch * seq_len / point.plan.step.seconds for point in points if point.plan is not None]
        color = _COLORS[curve.kind]
        axes.plot(counts, rates, color=color, lw=2.2, marker="o", ms=4, label=f"{curve.kind} scaling")
        if rates:
            ideal = [rates[0] * count / counts[0] for count in counts]
            axes.plot(counts, ideal, color=QUIET, lw=0.9, ls="--", zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis, text in ((axes.xaxis, lambda value, _: f"{value:,.0f}"), (axes.yaxis, lambda v, _: count_text(v))):
        axis.set_major_formatter(text)
    axes.set_xlabel("devices", fontsize=8.5, color=QUIET)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    style_axes(axes, "tokens per second; dashed: linear from the smallest")


def _shares(axes: Any, curve: ScaleCurve) -> None:
    points = _planned(curve)
    below = [0.0] * len(points)
    rows = {
        "computing": [1 - point.communication - point.bubble for point in points],
        "bubble": [point.bubble for point in points],
        "communication": [point.communication for point in points],
    }
    for name, color in _SHARES:
        axes.bar(range(len(points)), rows[name], bottom=below, width=0.75, color=color, label=name)
        below = [low + height for low, height in zip(below, rows[name], strict=True)]
    axes.set_xticks(range(len(points)), [f"{point.num_devices:,}" for point in points], rotation=60)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(loc="lower left", frameon=False, fontsize=8, labelcolor=INK)

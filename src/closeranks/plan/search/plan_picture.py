"""Draws plans as one picture: time of a step and memory of a device by part, and cost against time.

Left: a bar per layout, as long as its step, in the parts of the estimate. Middle: memory by part, with the device's
memory as a line. Right: the best plan on each number of devices, cost against days. Invariant: every bar and point is
an estimate, and matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.plan.picture_style import INK, QUIET, style_axes
from closeranks.plan.search.cost_curve import CostPoint
from closeranks.plan.search.plan_text import layout_text, money_text, seconds_text
from closeranks.plan.search.search import Plan

_COLORS = (
    "#2b6cb0", "#4f9bd9", "#9db8d2", "#c2601a", "#e0a458", "#2f7d5b", "#8d6bb8", "#b33951", "#5c6770", "#a9b4bf",
    "#d4b483", "#7fb7a3", "#e3c7e0", "#444e58",
)  # fmt: skip
_GIB = 1 << 30
_SHOWN = 0.004
_MOST_BARS = 10
_DPI = 130


def draw_plans(
    title: str, plans: Sequence[Plan], winner: Plan | None, memory_bytes: float, points: Sequence[CostPoint],
    currency: str, path: Path,
) -> Path:  # fmt: skip
    """Draw a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plans = plans[:_MOST_BARS]
    figure = Figure(figsize=(15.0, 6.6))
    FigureCanvasAgg(figure)
    figure.text(0.02, 0.955, title, fontsize=13, fontweight="bold", color=INK, va="center")
    left, middle, right = ((0.175, 0.27, 0.28, 0.60), (0.475, 0.27, 0.22, 0.60), (0.765, 0.27, 0.215, 0.60))
    names = [("* " if plan is winner else "") + layout_text(plan.choice) for plan in plans]
    times = [{part.name: part.seconds for part in plan.step.parts} for plan in plans]
    axes = figure.add_axes(left)
    _bars(axes, times, names, lambda value, _: seconds_text(value) if value else "0")
    style_axes(axes, "time of a step")
    axes = figure.add_axes(middle)
    _bars(axes, [{part.name: part.num_bytes / _GIB for part in plan.memory.parts} for plan in plans], [], None)
    axes.axvline(memory_bytes / _GIB, color=INK, lw=1.2, ls="--")
    style_axes(axes, "memory of a device, GiB; dashed: what it has")
    _cost_axes(figure.add_axes(right), points, currency)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=_DPI, facecolor="white", format="png")
    return unfinished.replace(path)


def _bars(axes: Any, rows: Sequence[dict[str, float]], labels: Sequence[str], formatter: Any) -> None:
    longest = max(sum(row.values()) for row in rows)
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name, 0) > _SHOWN * longest for row in rows)
    ]
    begins = [0.0] * len(rows)
    for number, name in enumerate(names):
        widths = [row.get(name, 0.0) for row in rows]
        color = _COLORS[number % len(_COLORS)]
        axes.barh(
            range(len(rows)), widths, left=begins, height=0.62, color=color, edgecolor="white", lw=0.4, label=name
        )
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), labels or [""] * len(rows))
    if formatter is not None:
        axes.xaxis.set_major_formatter(formatter)
    axes.legend(
        loc="upper left", bbox_to_anchor=(0.0, -0.1), ncols=3, frameon=False, fontsize=7.5, labelcolor=INK,
        handlelength=1.0, columnspacing=1.0,
    )  # fmt: skip
    axes.grid(False, axis="y")


def _cost_axes(axes: Any, points: Sequence[CostPoint], currency: str) -> None:
    known = [point for point in points if point.costs.days is not None]
    if not known:
        axes.text(0.5, 0.5, "name --tokens to see\ndays and cost", ha="center", va="center", color=QUIET, fontsize=10)
        axes.set_xticks([]), axes.set_yticks([])
        style_axes(axes, "cost against time")
        return
    has_price = all(point.costs.money is not None for point in known)
    heights = [float(point.costs.money or 0) if has_price else float(point.costs.device_hours or 0) for point in known]
    days = [float(point.costs.days or 0) for point in known]
    axes.plot(days, heights, color=_COLORS[0], lw=1.6, marker="o", ms=5)
    for point, x, y in zip(known, days, heights, strict=True):
        axes.annotate(
            f"{point.num_devices:,}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8, color=INK
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.15 * max(heights))
    axes.set_xlabel("days, with goodput", fontsize=8.5, color=QUIET)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: money_text(value, currency) if has_price else f"{value:,.0f}")
    style_axes(axes, "cost against time, by devices" if has_price else "device-hours against time, by devices")

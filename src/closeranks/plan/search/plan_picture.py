"""Draws plans as one picture: time of a step and memory of a device by kind, and cost against time.

Left: a bar per layout, as long as its step. Middle: its memory, with the device's memory as a line. Right, where more
than one number of devices was planned: the best plan on each, cost against time. Invariant: every bar and point is an
estimate, and matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from closeranks.plan.picture_style import INK, QUIET, legend_below, new_figure, round_ticks, save_png, style_axes
from closeranks.plan.search.cost_curve import CostPoint
from closeranks.plan.search.costs import DAY_S
from closeranks.plan.search.part_kinds import COLORS, memory_by_kind, time_by_kind
from closeranks.plan.search.plan_text import layout_text, money_text, seconds_text
from closeranks.plan.search.search import Plan

_GIB = 1 << 30
_SHOWN = 0.004
"""Of the longest bar: a kind that is smaller in every bar has no entry in the legend."""
_MOST_BARS = 10
_LABEL_COLUMNS = 34
_UNITS = (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw_plans(
    title: str, plans: Sequence[Plan], winner: Plan | None, memory_bytes: float, points: Sequence[CostPoint],
    currency: str, path: Path,
) -> Path:  # fmt: skip
    """Draw a PNG."""
    return save_png(plans_figure(title, plans, winner, memory_bytes, points, currency), path)


def plans_figure(
    title: str, plans: Sequence[Plan], winner: Plan | None, memory_bytes: float, points: Sequence[CostPoint],
    currency: str,
) -> Any:  # fmt: skip
    plans = plans[:_MOST_BARS]
    widths = (1.15, 1.0, 0.9)[: 3 if points else 2]
    figure = new_figure(title, (15.5 * sum(widths) / 3.05, 2.9 + 0.42 * max(len(plans), 5)))
    grid = figure.add_gridspec(2, len(widths), width_ratios=widths, height_ratios=(1.0, 0.01))
    time, memory = (figure.add_subplot(grid[0, place]) for place in range(2))
    names = [_label(plan, is_winner=plan is winner) for plan in plans]
    shown = _bars(time, [time_by_kind(plan) for plan in plans], names)
    legend_below(figure.add_subplot(grid[1, 0]), shown, 3)
    time.xaxis.set_major_formatter(lambda value, _: seconds_text(value) if value else "0")
    style_axes(time, "time of a step")
    gib = [{kind: size / _GIB for kind, size in memory_by_kind(plan).items()} for plan in plans]
    shown = _bars(memory, gib, [], least=memory_bytes / _GIB)
    legend_below(figure.add_subplot(grid[1, 1]), shown, 3)
    memory.axvline(memory_bytes / _GIB, color=INK, lw=1.2, ls="--")
    style_axes(memory, "memory of a device, GiB; dashed: what it has")
    for axes in (time, memory):
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", labelcolor=INK, length=0)
    if points:
        _cost_axes(figure.add_subplot(grid[0, 2]), points, currency)
    return figure


def _label(plan: Plan, *, is_winner: bool) -> str:
    return fill(("* " if is_winner else "") + layout_text(plan.choice), _LABEL_COLUMNS)


def _bars(axes: Any, rows: Sequence[dict[str, float]], labels: Sequence[str], least: float = 0.0) -> list[Any]:
    """One bar per row; what is drawn for each kind that a legend names. ``least``: what the axis reaches."""
    longest = max(sum(row.values()) for row in rows)
    begins = [0.0] * len(rows)
    named = []
    for kind, color in COLORS.items():
        widths = [row.get(kind, 0.0) for row in rows]
        drawn = axes.barh(range(len(rows)), widths, left=begins, height=0.62, color=color, label=kind)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        if max(widths) > _SHOWN * longest:
            named.append(drawn)
    axes.set_xlim(0, 1.04 * max(longest, least))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), labels or [""] * len(rows))
    return named


def _cost_axes(axes: Any, points: Sequence[CostPoint], currency: str) -> None:
    from matplotlib.ticker import MaxNLocator

    known = [point for point in points if point.costs.days is not None]
    if not known:
        axes.text(0.5, 0.5, "name --tokens to see\ntime and cost", ha="center", va="center", color=QUIET, fontsize=10)
        axes.set_xticks([]), axes.set_yticks([])
        style_axes(axes, "cost against time")
        return
    has_price = all(point.costs.money is not None for point in known)
    heights = [float(point.costs.money or 0) if has_price else float(point.costs.device_hours or 0) for point in known]
    seconds = [DAY_S * float(point.costs.days or 0) for point in known]
    unit, unit_s = next((one for one in _UNITS if max(seconds) >= 2 * one[1]), _UNITS[-1])
    times = [one / unit_s for one in seconds]
    axes.plot(times, heights, color=INK, lw=1.4, marker="o", ms=5)
    for point, x, y in zip(known, times, heights, strict=True):
        axes.annotate(
            f"{point.num_devices:,}", (x, y), textcoords="offset points", xytext=(0, 8), fontsize=8.5, color=INK,
            ha="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.12)
    round_ticks(axes.xaxis, min(times), max(times))
    axes.set_ylim(0, 1.2 * max(heights))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel(f"{unit}, with goodput", fontsize=8.5, color=QUIET)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.yaxis.set_major_formatter(lambda value, _: money_text(value, currency) if has_price else f"{value:,.0f}")
    style_axes(axes, "cost against time, by devices" if has_price else "device-hours against time, by devices")

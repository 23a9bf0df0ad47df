"""Draws one plot of a run: loss, throughput, evaluated metrics, learning rate and gradient norm.

Drawn from the run folder alone, in any process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.core.events import StepDone
from closeranks.telemetry import formatting
from closeranks.telemetry.live.throughput import efficiency
from closeranks.telemetry.reports.curves import (
    StepCurve,
    axis_limits,
    downsample,
    mean_curve,
    rates,
    raw_curve,
    smooth_curve,
    wants_log_scale,
)
from closeranks.telemetry.reports.plot_style import (
    BLUE,
    GRAY,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    new_figure,
    save_figure,
    set_title,
    tidy,
)
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import RunHistory, load_history
from closeranks.telemetry.run_log.step_blocks import StepBlock

_METRIC_COLORS = (ORANGE, BLUE, PURPLE, GREEN)
_LABEL_SHARE = 0.06
"""Share of the axis that the label of a generation takes, with the space around it."""


def draw_run(folder: Path) -> Path | None:
    """Draw ``curve.png`` into the run folder; None if no step was recorded and there is nothing to draw."""
    history = load_history(folder)
    if not history.steps:
        return None
    run = RunFolder(folder)
    name = str(run.resolved().get("run.name") or folder.resolve().name)
    return save_figure(_figure(history, name), run.plot)


def _figure(history: RunHistory, name: str) -> Any:
    figure = new_figure(6.0)
    metrics = evaluated_metrics(history)
    num_below = 3 if metrics else 2
    grid = figure.add_gridspec(
        2, num_below, height_ratios=(1.9, 1), left=0.07, right=0.93, top=0.83, bottom=0.085, hspace=0.46,
        wspace=0.32 if metrics else 0.2,
    )  # fmt: skip
    above = figure.add_subplot(grid[0, :])
    below = [figure.add_subplot(grid[1, place]) for place in range(num_below)]
    panels = PlotPanels(above, below[0], below[-1])
    for axes in (panels.loss, *below):
        _tidy(axes, history)
    if metrics:
        _draw_metrics(below[1], metrics)
        for axes in below:  # narrow ones
            axes.locator_params(axis="x", nbins=5)
    _draw_loss(panels.loss, history)
    _draw_throughput(panels.throughput, history, is_narrow=bool(metrics))
    _draw_learning(panels.rate, history, is_narrow=bool(metrics))
    _mark_restarts(panels.loss, history)
    figure.text(0.07, 0.95, name, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.07, 0.905, _subtitle(history), fontsize=9.5, color=GRAY, va="center")
    return figure


@dataclass(frozen=True, slots=True)
class PlotPanels:
    loss: Any
    throughput: Any
    rate: Any


def _subtitle(history: RunHistory) -> str:
    started = history.started
    steps = f"step {history.steps[-1].step}"
    if started is None:
        return steps
    parts = (
        f"{formatting.compact(started.num_params)} parameters",
        f"{formatting.count(started.world_size, 'worker')} on {started.device}",
        started.precision,
        f"{steps} of {started.last_step}" if started.last_step else steps,
        formatting.duration(history.seconds),
    )
    return "   ·   ".join(parts)


def _tidy(axes: Any, history: RunHistory) -> None:
    from matplotlib.ticker import MaxNLocator

    tidy(axes, "")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    first, last = history.steps[0].step, history.steps[-1].step
    axes.set_xlim(first - 1, last + max(0.5, 0.01 * (last - first)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: formatting.tick(value))
    axes.set_xlabel("step", fontsize=8.5, color=GRAY, labelpad=2)


def _draw_loss(axes: Any, history: RunHistory) -> None:
    taken = history.taken
    raw = raw_curve(taken, history.blocks, "loss")
    smooth = smooth_curve(mean_curve(taken, history.blocks, "loss"))
    is_log = wants_log_scale((*smooth.values, *(done.loss for done in history.evals)))
    if is_log:
        axes.set_yscale("log")
    few = len(raw.steps) < 30
    thin = downsample(raw)
    axes.plot(thin.steps, thin.values, color=BLUE, alpha=0.38, linewidth=0.9, marker="o" if few else "", markersize=3)
    axes.plot(
        smooth.steps, smooth.values, color=BLUE, linewidth=2.1, label="training, smoothed", solid_capstyle="round"
    )
    if history.evals:
        steps, losses = [done.step for done in history.evals], [done.loss for done in history.evals]
        axes.plot(
            steps, losses, color=ORANGE, marker="o", markersize=5.5, markeredgecolor="white", linewidth=1.0,
            linestyle=(0, (4, 2)),
            label="evaluation", clip_on=False, zorder=4,
        )  # fmt: skip
    _mark_skipped(axes, history)
    _mark_faults(axes, history, smooth)
    _limit(axes, raw, smooth, [done.loss for done in history.evals], is_log)
    value = f"{formatting.brief(taken[0].loss)} → {formatting.brief(taken[-1].loss)}" if taken else "no step was taken"
    if history.evals:
        value += f",  evaluation {formatting.brief(history.evals[-1].loss)}"
    set_title(axes, "loss" + (" (log scale)" if is_log else ""), value)
    has_grown = bool(smooth.finite()) and smooth.finite()[-1] > smooth.finite()[0]
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left" if has_grown else "upper right")


def _limit(axes: Any, raw: StepCurve, smooth: StepCurve, evals: list[float], is_log: bool) -> None:
    bounds = axis_limits(raw, smooth, is_log=is_log)
    if bounds is not None:
        finite = StepCurve((), tuple(evals)).finite()
        axes.set_ylim(min(bounds.low, *finite, bounds.low), max(bounds.high, *finite, bounds.high))


def _mark_skipped(axes: Any, history: RunHistory) -> None:
    skipped = [block.first for block in history.blocks if block.num_skipped]
    skipped = skipped or [step.step for step in history.steps if not step.taken]
    if skipped:
        label = formatting.count(history.num_skipped, "skipped step")
        transform = axes.get_xaxis_transform()
        axes.plot(
            skipped, [0.015] * len(skipped), color=RED, marker="|", markersize=9, linestyle="", transform=transform,
            label=label, clip_on=False,
        )  # fmt: skip


def _mark_restarts(axes: Any, history: RunHistory) -> None:
    for place, step in enumerate(history.restarts):
        axes.axvline(step, color=GRAY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=0)
        if place < 6:  # beyond that the labels would overlap
            axes.annotate(
                f"resumed from {step}", (step, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", fontsize=8, color=GRAY, va="top", ha="left",
            )  # fmt: skip


def _mark_faults(axes: Any, history: RunHistory, smooth: StepCurve) -> None:
    """A thin mark on the curve where a rank was lost, with the generation that took over; the curve continues."""
    faults = history.fault_history.faults
    if not faults or not smooth.finite():
        return
    first, last = smooth.steps[0], smooth.steps[-1]
    steps = [min(max(fault.lost.step or first, first), last) for fault in faults]
    values = [_value_at(smooth, step) for step in steps]
    axes.plot(
        steps, values, color=RED, marker="|", markersize=14, markeredgewidth=1.0, linestyle="", zorder=5,
        label=formatting.count(len(faults), "fault") + (", ranks closed" if all(one.closed for one in faults) else ""),
    )  # fmt: skip
    named = -math.inf
    for step, value, fault in sorted(zip(steps, values, faults, strict=True), key=lambda mark: mark[0]):
        if step - named >= _LABEL_SHARE * (last - first):  # closer than that the labels would overlap
            named = step
            axes.annotate(
                f"gen {fault.generation}", (step, value), xytext=(2, 7), textcoords="offset points",
                fontsize=7.5, color=RED, va="bottom", ha="left", zorder=5,
            )  # fmt: skip


def _value_at(curve: StepCurve, step: int) -> float:
    """The value at the point nearest to a step, among those that have one."""
    known = ((abs(at - step), value) for at, value in zip(curve.steps, curve.values, strict=True))
    return min((point for point in known if math.isfinite(point[1])), key=lambda point: point[0])[1]


def evaluated_metrics(history: RunHistory) -> dict[str, StepCurve]:
    """The first few metrics of evaluations, by name; values that are not finite are left out."""
    names = list(dict.fromkeys(name for done in history.evals for name in done.metrics))[: len(_METRIC_COLORS)]
    found = {}
    for name in names:
        points = [(done.step, done.metrics[name]) for done in history.evals if name in done.metrics]
        known = [(step, value) for step, value in points if math.isfinite(value)]
        if known:
            found[name] = StepCurve(tuple(step for step, _ in known), tuple(value for _, value in known))
    return found


def _draw_metrics(axes: Any, metrics: dict[str, StepCurve]) -> None:
    """Metrics that evaluations measured besides the loss: a line each, with a legend if there are several."""
    for color, (name, curve) in zip(_METRIC_COLORS, metrics.items(), strict=False):
        axes.plot(
            curve.steps, curve.values, color=color, marker="o", markersize=4, linewidth=1.6, label=name, clip_on=False
        )
    axes.margins(y=0.15)
    (first, curve), is_one = next(iter(metrics.items())), len(metrics) == 1
    if not is_one:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    value = formatting.metric(curve.values[-1]) if is_one else ""
    set_title(axes, f"evaluated {first}" if is_one else "evaluated", value, color=ORANGE)


def _draw_throughput(axes: Any, history: RunHistory, *, is_narrow: bool) -> None:
    started = history.started
    item = started.item if started is not None else "item"
    counted: Sequence[StepDone | StepBlock] = [block for block in history.blocks if block.start is None]
    counted = counted or [step for step in history.steps if step.step not in history.first_steps]
    average = history.throughput().items_per_s
    if not counted or average is None:
        set_title(axes, "throughput", "too short to measure", color=GREEN)
        axes.set_yticks([])
        return
    each = raw_curve((), history.blocks, "rate") if history.blocks else rates(counted, 1)
    each, steady = downsample(each), downsample(rates(counted, max(5, len(counted) // 30)))
    axes.plot(each.steps, each.values, color=GREEN, alpha=0.25, linewidth=0.8)
    axes.plot(steady.steps, steady.values, color=GREEN, linewidth=1.8)
    axes.set_ylim(0, 1.3 * max(steady.finite()))
    axes.yaxis.set_major_formatter(lambda value, _: formatting.tick(value))
    value = formatting.rate(average, item)
    if started is not None and not is_narrow:
        shares = efficiency(started, average)
        if shares.mfu is not None:
            value += f",  MFU {formatting.percent(shares.mfu)}"
        elif shares.peak_share is not None:
            value += f",  {formatting.percent(shares.peak_share)} of matmul peak"
    set_title(axes, "throughput", value, color=GREEN)


def _draw_learning(axes: Any, history: RunHistory, *, is_narrow: bool) -> None:
    """Gradient norm on the left axis, learning rate on the right; each title in its line's colour."""
    norm = raw_curve(history.steps, history.blocks, "grad_norm")
    rate = mean_curve(history.steps, history.blocks, "lr")
    thin, smooth = downsample(norm), smooth_curve(mean_curve(history.steps, history.blocks, "grad_norm"))
    is_log = wants_log_scale(norm.values)
    if is_log:
        axes.set_yscale("log")
    axes.plot(thin.steps, thin.values, color=PURPLE, alpha=0.25, linewidth=0.8)
    axes.plot(smooth.steps, smooth.values, color=PURPLE, linewidth=1.8)
    bounds = axis_limits(norm, smooth, is_log=is_log)
    if bounds is not None:
        axes.set_ylim(bounds.low if is_log else 0, bounds.high)
    right = axes.twinx()
    for side in ("top", "left", "bottom"):
        right.spines[side].set_visible(False)
    right.spines["right"].set_color(PALE)
    right.tick_params(colors=GRAY, labelsize=8.5, length=3)
    right.plot(rate.steps, rate.values, color=INK, linewidth=1.6)
    right.set_ylim(0, 1.12 * (max(rate.finite(), default=0.0) or 1.0))
    right.yaxis.set_major_formatter(lambda value, _: formatting.tick(value))
    set_title(axes, "gradient norm" + (" (log scale)" if is_log and not is_narrow else ""), color=PURPLE)
    right.set_title("learning rate", loc="right", fontsize=10, color=INK, fontweight="bold", pad=7)

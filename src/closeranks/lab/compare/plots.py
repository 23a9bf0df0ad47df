"""Plots a comparison: the losses of all settings, bars of what they cost, and all conditions side by side.

Drawn from outcomes and table alone. Invariant: a setting has one colour in all panels; bars start at zero; what was not
measured or not reached is stated in words in place of its bar. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from closeranks.lab.compare.config import CompareConfig
from closeranks.lab.compare.result_table import ResultTable, RunStat, SettingRow
from closeranks.lab.compare.run_outcome import ComparisonRunOutcome, MetricPoint
from closeranks.telemetry.formatting import brief, count, duration, size, tick
from closeranks.telemetry.reports.curves import quantile, wants_log_scale

_INK, _QUIET, _GRID = "#1f2933", "#7b8794", "#e6eaef"
_COLOURS = ("#2563a8", "#e07b28", "#2f855a", "#7c4d9e", "#c53030", "#0e8f9c", "#8a6d1f", "#d1568b", "#52606d")
_MAX_POINTS = 400
_MAX_NAME_LENGTH = 26


def draw_curves(
    path: Path, compare: CompareConfig, table: ResultTable, outcomes: Sequence[ComparisonRunOutcome]
) -> Path | None:
    """Loss over time and over steps: a thin line for each run, a thick one for the mean. None: nothing to draw."""
    drawn = [row for row in table.rows if any(len(one.losses) > 1 for one in outcomes if one.setting == row.name)]
    if not drawn:
        return None
    figure = _figure(10.4, 4.8)
    grid = figure.add_gridspec(1, 2, left=0.065, right=0.985, top=0.79, bottom=0.19, wspace=0.16)
    panels = (
        (figure.add_subplot(grid[0]), "loss over time", "seconds of training", lambda point: point.at_s),
        (figure.add_subplot(grid[1]), "loss over steps", "step", lambda point: float(point.step)),
    )
    is_log = wants_log_scale(point.value for one in _sound(outcomes) for point in one.losses)
    for axes, title, label, x_of in panels:
        _style_axes(axes, title + (" (log scale)" if is_log else ""), label)
        if is_log:
            axes.set_yscale("log")
        for row in drawn:
            runs = [one.losses for one in outcomes if one.setting == row.name]
            _draw_runs(axes, runs, x_of, _colour(table, row), _shorten(row.name))
        _limit_y(axes, outcomes)
        if compare.target is not None and compare.target.metric == "loss":
            goal = compare.target.value
            axes.axhline(goal, color=_INK, linewidth=1.0, linestyle=(0, (2, 3)), zorder=1)
            axes.annotate(
                f"target {brief(goal)}", (1.0, goal), xycoords=("axes fraction", "data"),
                xytext=(-2, 3), textcoords="offset points", fontsize=8, color=_INK, ha="right", va="bottom",
            )  # fmt: skip
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9, labelcolor=_INK
    )
    runs_each = max(row.num_runs for row in table.rows)
    _draw_header(figure, compare, table, f"{count(runs_each, 'run')} of each setting; thick: their mean")
    return _save(figure, path)


def draw_bars(path: Path, compare: CompareConfig, table: ResultTable) -> Path:
    """Steps per second, bytes per step, time to the target, and the final figure."""
    goal = f"seconds to {table.metric} {brief(table.target)}" if table.target is not None else "seconds of training"
    panels: list[tuple[str, Callable[[SettingRow], RunStat | None], Callable[[float], str], str]] = [
        ("steps a second", lambda row: row.steps_per_s, brief, "not measured"),
        ("bytes sent a step", lambda row: row.bytes_per_step, size, "not measured"),
        (goal, _target_or_all(table), duration, "not reached" if table.target is not None else "not measured"),
        (f"final {table.metric}", lambda row: row.final, brief, "not measured"),
    ]
    num = len(table.rows)
    figure = _figure(11.6, 1.75 + 0.42 * num)
    left = 0.03 + 0.0075 * max(len(_shorten(row.name)) for row in table.rows)
    top, bottom = 1 - 1.15 / (1.75 + 0.42 * num), 0.3 / (1.75 + 0.42 * num)
    grid = figure.add_gridspec(1, len(panels), left=left, right=0.985, top=top, bottom=bottom, wspace=0.12)
    for number, (title, pick, text_of, missing) in enumerate(panels):
        axes = figure.add_subplot(grid[number])
        _draw_bars(axes, table, pick, text_of, missing)
        axes.set_title(title, loc="left", fontsize=9.5, color=_INK, fontweight="bold", pad=6)
        axes.set_yticks(range(num), [_shorten(row.name) for row in table.rows] if number == 0 else [""] * num)
    _draw_header(figure, compare, table, "bars: means; whiskers: from the lowest run to the highest")
    return _save(figure, path)


def draw_conditions(path: Path, compare: CompareConfig, tables: Sequence[ResultTable]) -> Path:
    """Every setting under every condition: speed, time, and the final figure."""
    first = tables[0]
    goal = f"seconds to {first.metric} {brief(first.target)}" if first.target is not None else "seconds of training"
    panels: list[tuple[str, Callable[[SettingRow], RunStat | None]]] = [
        ("steps a second", lambda row: row.steps_per_s),
        (goal, _target_or_all(first)),
        (f"final {first.metric}", lambda row: row.final),
    ]
    height = 1.9 + 0.2 * len(tables) * (len(first.rows) + 1)
    figure = _figure(11.6, height)
    left = 0.03 + 0.0075 * max(len(_shorten(table.condition)) for table in tables)
    grid = figure.add_gridspec(
        1, len(panels), left=left, right=0.985, top=1 - 1.05 / height, bottom=0.6 / height, wspace=0.1
    )
    for number, (title, pick) in enumerate(panels):
        axes = figure.add_subplot(grid[number])
        _draw_groups(axes, tables, pick)
        axes.set_title(title, loc="left", fontsize=9.5, color=_INK, fontweight="bold", pad=6)
        axes.set_yticks(range(len(tables)), [_shorten(one.condition) if number == 0 else "" for one in tables])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(6, len(labels)), frameon=False, fontsize=9)
    _draw_header(figure, compare, None, "bars: means over the runs; a missing bar: not reached, or not finished")
    return _save(figure, path)


def _draw_groups(axes: Any, tables: Sequence[ResultTable], pick: Callable[[SettingRow], RunStat | None]) -> None:
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_INK)
    axes.set_xticks([])
    axes.set_ylim(len(tables) - 0.5, -0.5)
    stats = [[(pick(row), _colour(table, row), row.name) for row in table.rows] for table in tables]
    highest = max((stat.mean for group in stats for stat, _, _ in group if stat), default=0.0) or 1.0
    axes.set_xlim(0, 1.2 * highest)
    for y, group in enumerate(stats):
        size_each = 0.84 / len(group)
        for place, (stat, colour, name) in enumerate(group):
            at = y - 0.42 + size_each * (place + 0.5)
            axes.barh(at, stat.mean if stat else 0.0, height=0.9 * size_each, color=colour, label="" if y else name)
            if stat is not None:
                axes.text(stat.mean + 0.01 * highest, at, brief(stat.mean), fontsize=7, color=_INK, va="center")


def _target_or_all(table: ResultTable) -> Callable[[SettingRow], RunStat | None]:
    return (lambda row: row.seconds_to_target) if table.target is not None else (lambda row: row.seconds)


def _draw_bars(
    axes: Any,
    table: ResultTable,
    pick: Callable[[SettingRow], RunStat | None],
    text_of: Callable[[float], str],
    missing: str,
) -> None:
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#c3cbd4")
    axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_INK)
    axes.set_xticks([])
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    highest = max((stat.high for row in table.rows if (stat := pick(row))), default=0.0) or 1.0
    axes.set_xlim(0, 1.5 * highest)  # room for the figure at the end of the longest bar
    for y, row in enumerate(table.rows):
        stat = pick(row)
        if stat is None:
            text = row.reason.partition(":")[0] or missing
            axes.text(0.02 * highest, y, text, fontsize=8.5, color=_QUIET, va="center", style="italic")
            continue
        axes.barh(y, stat.mean, height=0.62, color=_colour(table, row), alpha=0.88)
        if stat.num > 1:
            axes.plot([stat.low, stat.high], [y, y], color=_INK, linewidth=1.1, solid_capstyle="butt")
        axes.text(stat.high + 0.03 * highest, y, text_of(stat.mean), fontsize=9, color=_INK, va="center")


def _draw_runs(
    axes: Any, runs: Sequence[Sequence[MetricPoint]], x_of: Callable[[MetricPoint], float], colour: str, name: str
) -> None:
    runs = [_downsample(run) for run in runs if len(run) > 1]
    alone = len(runs) == 1
    for run in runs:
        xs, ys = [x_of(point) for point in run], [point.value for point in run]
        axes.plot(xs, ys, color=colour, linewidth=2.0 if alone else 0.8, alpha=1 if alone else 0.35,
                  label=name if alone else None)  # fmt: skip
    if not alone:
        xs, ys = mean_line(runs, x_of)
        axes.plot(xs, ys, color=colour, linewidth=2.0, label=name, solid_capstyle="round")


def mean_line(
    runs: Sequence[Sequence[MetricPoint]], x_of: Callable[[MetricPoint], float]
) -> tuple[list[float], list[float]]:
    """The mean of several runs over the range that all of them cover, at the points of the run that has the most."""
    first = max(x_of(run[0]) for run in runs)
    last = min(x_of(run[-1]) for run in runs)
    longest = max(runs, key=len)
    xs = [x for point in longest if first <= (x := x_of(point)) <= last]
    return xs, [mean(_value_at(run, x, x_of) for run in runs) for x in xs]


def _value_at(run: Sequence[MetricPoint], x: float, x_of: Callable[[MetricPoint], float]) -> float:
    for before, after in pairwise(run):
        if x_of(before) <= x <= x_of(after):
            width = x_of(after) - x_of(before)
            share = (x - x_of(before)) / width if width > 0 else 0.0
            return before.value + share * (after.value - before.value)
    return run[-1].value


def _downsample(run: Sequence[MetricPoint]) -> list[MetricPoint]:
    stride = math.ceil(len(run) / _MAX_POINTS)
    return [*run[:-1:stride], run[-1]]


def _sound(outcomes: Sequence[ComparisonRunOutcome]) -> Sequence[ComparisonRunOutcome]:
    return [one for one in outcomes if one.is_sound] or outcomes


def _limit_y(axes: Any, outcomes: Sequence[ComparisonRunOutcome]) -> None:
    """Limit the y axis to the losses of the runs that finished; curves that diverged may be cut off."""
    values = [point.value for one in _sound(outcomes) for point in one.losses if math.isfinite(point.value)]
    if values:
        low, high = min(values), quantile(values, 0.998)
        margin = 0.05 * (high - low) or 0.1
        if axes.get_yscale() == "log":
            axes.set_ylim(low / 1.15, high * 1.15)
        else:
            axes.set_ylim(low - margin, high + margin)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def _style_axes(axes: Any, title: str, label: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3cbd4")
    axes.tick_params(colors=_QUIET, labelsize=8.5, length=3, which="both")
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: tick(value))
    axes.set_xlabel(label, fontsize=8.5, color=_QUIET, labelpad=2)
    axes.set_title(title, loc="left", fontsize=10, color=_INK, fontweight="bold", pad=7)


def _draw_header(figure: Any, compare: CompareConfig, table: ResultTable | None, note: str) -> None:
    """``table`` None: the picture is of all conditions."""
    height = figure.get_size_inches()[1]
    where = f"{table.condition}   ·   " if table and table.condition else ""
    network = next((one.network for one in compare.conditions if table and one.name == table.condition), None)
    if network is not None:
        parts = [f"{network.hosts} hosts"]
        parts += [f"{network.mbit:g} Mbit/s"] if network.mbit else []
        parts += [f"{network.delay_ms:g} ms"] if network.delay_ms else []
        where += ", ".join(parts) + "   ·   "
    name = Path(compare.job).stem
    figure.text(0.012, 1 - 0.25 / height, name, fontsize=14, fontweight="bold", color=_INK, va="center")
    figure.text(0.012, 1 - 0.5 / height, where + note, fontsize=9, color=_QUIET, va="center")


def _colour(table: ResultTable, row: SettingRow) -> str:
    return _COLOURS[table.rows.index(row) % len(_COLOURS)]


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"


def _save(figure: Any, path: Path) -> Path:
    """Replace the picture atomically: a viewer that has it open never sees half of one."""
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=140, facecolor="white", format="png")
    return unfinished.replace(path)

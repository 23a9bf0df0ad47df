"""Draws where the time of a run's workers went, loss by loss, and what the run had cost at each moment.

Drawn from the run folder alone, in any process. Invariants: the bars of useful time and of all losses add up to workers
times wall time; where no price is known, device-hours are drawn instead of money.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from closeranks.facts.devices import is_cpu
from closeranks.facts.prices import DevicePrice
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.account_text import AccountRow, account_rows, goodput_words
from closeranks.telemetry.goodput.run_account import build_account, load_records, session_accounts
from closeranks.telemetry.goodput.run_cost import find_price, money
from closeranks.telemetry.goodput.spending import SpendingPoint, spending
from closeranks.telemetry.goodput.time_account import (
    DETECTION,
    RECOVERY,
    REDONE,
    ROW_WORDS,
    UNACCOUNTED,
    USEFUL,
    TimeAccount,
)
from closeranks.telemetry.reports.plot_style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PALE,
    RED,
    SMALL,
    new_figure,
    save_figure,
    tidy,
)
from closeranks.telemetry.run_log.run_folder import RunFolder

_OF_FAULTS = {ROW_WORDS[name] for name in (REDONE, DETECTION, RECOVERY)}
_COLORS = {ROW_WORDS[USEFUL]: GREEN, ROW_WORDS[UNACCOUNTED]: PALE, **dict.fromkeys(_OF_FAULTS, RED)}
_MOST_FAULTS = 200
"""More marks than that would be one line."""


class Spent(NamedTuple):
    """The unit in which the cost of a run is drawn: an amount per worker-second, and words for an amount."""

    per_worker_s: float
    label: str
    currency: str = ""

    def words(self, amount: float) -> str:
        return money(amount, self.currency) if self.currency else f"{amount:.3g} {self.label}"


def draw_goodput(folder: Path) -> Path | None:
    """Draw ``goodput.png`` into the run folder; None if nothing was measured."""
    records = load_records(folder)
    account = build_account(*records)
    if not account_rows(account):
        return None
    points = spending(session_accounts(records.ranks, records.agent))
    device = next((one.started.device for record in records.ranks.values() for one in record.sessions[-1:]), "")
    price, _ = find_price(folder, device)
    return save_figure(_figure(account, points, unit_of(price, device)), RunFolder(folder).goodput_plot)


def unit_of(price: DevicePrice | None, device: str) -> Spent:
    if price is not None:
        return Spent(price.cost(1.0) / 3600, "cost", price.currency)
    return Spent(1 / 3600, "worker-hours" if is_cpu(device) else "GPU-hours")


def _figure(account: TimeAccount, points: Sequence[SpendingPoint], unit: Spent) -> Any:
    rows = account_rows(account)
    above, below = 0.55 + 0.24 * (len(rows) + 1), 1.9
    figure = new_figure(1.1 + above + below)
    grid = figure.add_gridspec(
        2, 1, height_ratios=(above, below), left=0.27, right=0.94, top=1 - 0.4 / (1.1 + above + below),
        bottom=0.5 / (1.1 + above + below), hspace=1.3 / (above + below),
    )  # fmt: skip
    _draw_losses(figure.add_subplot(grid[0]), account, rows)
    _draw_cost(figure.add_subplot(grid[1]), points, unit)
    return figure


def _draw_losses(axes: Any, account: TimeAccount, rows: Sequence[AccountRow]) -> None:
    """A waterfall: the whole, useful time, and each loss where the one above it ends."""
    labels = ["workers × wall time", *(row.label for row in rows)]
    lefts, left = [0.0], 0.0
    for row in rows:
        lefts.append(left if row.share >= 0 else left + row.share)
        left += row.share
    widths = [1.0, *(abs(row.share) for row in rows)]
    colors = [GRAY, *(_COLORS.get(row.label, ORANGE) for row in rows)]
    per_worker = account.wall_s / account.worker_s
    seconds = [account.wall_s, *(row.seconds * per_worker for row in rows)]
    axes.barh(labels, widths, left=lefts, color=colors, height=0.66)
    for label, start, width, own_s in zip(labels, lefts, widths, seconds, strict=True):
        text = f"{formatting.percent(width)}, {formatting.duration(abs(own_s))}"
        is_inside = start + width > 0.75
        axes.annotate(
            text, (start if is_inside and start > 0.3 else start + width, label),
            xytext=(-4, 0) if is_inside else (4, 0), textcoords="offset points", va="center",
            ha="right" if is_inside else "left", fontsize=SMALL - 0.5,
            color="white" if is_inside and start <= 0.3 else GRAY,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(min(0.0, *lefts), 1.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    tidy(axes, "goodput", goodput_words(account))
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def _draw_cost(axes: Any, points: Sequence[SpendingPoint], unit: Spent) -> None:
    scale, name = _time_unit(points[-1].wall_s)
    times = [point.wall_s / scale for point in points]
    spent, lost = ([unit.per_worker_s * getattr(point, what) for point in points] for what in ("worker_s", "lost_s"))
    axes.fill_between(times, spent, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(times, spent, color=BLUE, linewidth=1.8, label="all")
    if lost[-1] > 0:
        axes.fill_between(times, lost, color=RED, alpha=0.6, linewidth=0)
        axes.plot(times, lost, color=RED, linewidth=1.2, label="lost to faults")
    faults = [time for time, point in zip(times, points, strict=True) if point.is_fault]
    if 0 < len(faults) <= _MOST_FAULTS:
        axes.plot(
            faults, [0.02] * len(faults), color=RED, marker="|", markersize=9, linestyle="",
            transform=axes.get_xaxis_transform(), clip_on=False, label=formatting.count(len(faults), "fault"),
        )  # fmt: skip
    words = unit.words(spent[-1])
    if lost[-1] > 0:
        words += f", of it {unit.words(lost[-1])} ({formatting.percent(lost[-1] / spent[-1])}) lost to faults"
    tidy(axes, "cost" if unit.currency else unit.label, words)
    axes.set_xlim(0, times[-1] or 1.0)
    axes.set_ylim(0, 1.08 * spent[-1] or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: money(value, unit.currency) if unit.currency else f"{value:.3g}")
    axes.set_xlabel(f"{name} since the run began, without the time between commands", fontsize=SMALL, color=GRAY)
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK, loc="upper left")


def _time_unit(seconds: float) -> tuple[float, str]:
    for scale, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * scale:
            return scale, name
    return 1.0, "seconds"

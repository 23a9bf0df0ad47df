"""Formats the account of a run for people: rows of labels and figures, for a terminal and for the report. Pure.

Invariant: a figure that is not known is left out, and time that nothing explains is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.devices import is_cpu
from closeranks.facts.prices import DevicePrice
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.run_cost import cost_words, energy_words
from closeranks.telemetry.goodput.time_account import ROW_WORDS, STRAGGLER, UNACCOUNTED, USEFUL, TimeAccount

_SHOWN = 0.0005
"""Losses of a smaller share are summed up in one row, except what is unaccounted."""


@dataclass(frozen=True, slots=True)
class AccountRow:
    label: str
    seconds: float
    share: float


def account_rows(account: TimeAccount) -> list[AccountRow]:
    """Useful time, then the losses, largest first. Empty before anything was measured."""
    if account.worker_s <= 0:
        return []
    losses = sorted(account.losses().items(), key=lambda row: -row[1])
    shown = [(name, s) for name, s in losses if name != UNACCOUNTED and s / account.worker_s >= _SHOWN]
    unaccounted_s = round(account.rows.get(UNACCOUNTED, 0.0), 4)
    useful_s = account.rows.get(USEFUL, 0.0)
    rest_s = account.worker_s - useful_s - unaccounted_s - sum(seconds for _, seconds in shown)
    rows = [(ROW_WORDS[USEFUL], useful_s), *((ROW_WORDS[name], seconds) for name, seconds in shown)]
    if rest_s > 1e-6 * account.worker_s:
        rows.append(("other losses", rest_s))
    rows.append((ROW_WORDS[UNACCOUNTED], unaccounted_s))
    return [AccountRow(label, seconds, seconds / account.worker_s) for label, seconds in rows]


def goodput_words(account: TimeAccount) -> str:
    """``93.1% of 4 workers x 20 min 52 s``, and what happened in that time."""
    if account.goodput is None:
        return ""
    workers = account.worker_s / account.wall_s if account.wall_s > 0 else 0.0
    text = f"{formatting.percent(account.goodput)} of {workers:.4g} workers × {formatting.duration(account.wall_s)}"
    parts = [
        formatting.count(account.num_launches, "command") if account.num_launches > 1 else "",
        formatting.count(account.num_faults, "fault") if account.num_faults else "",
        f"{formatting.count(account.num_redone, 'step')} redone" if account.num_redone else "",
    ]
    return ", ".join([text, *filter(None, parts)])


def hours_words(account: TimeAccount, device: str) -> str:
    """``3.1 GPU-hours``."""
    name = "worker-hours (CPU)" if is_cpu(device) else "GPU-hours"
    return f"{account.device_hours:.4g} {name}"


def bill(account: TimeAccount, price: DevicePrice | None, device: str, item: str) -> list[tuple[str, str]]:
    """Labels and figures: goodput, hours, cost and energy."""
    if account.goodput is None:
        return []
    rows = [("goodput", goodput_words(account)), ("hours", hours_words(account, device))]
    rows.append(("cost", cost_words(account, price, device, item)))
    if account.energy_j is not None:
        rows.append(("energy", f"{energy_words(account.energy_j)}, of the accelerators alone"))
    return rows


def account_lines(account: TimeAccount, price: DevicePrice | None, device: str, item: str) -> list[str]:
    """For a terminal."""
    rows = account_rows(account)
    if not rows:
        return []
    width = max(len(row.label) for row in rows)
    per_worker = account.wall_s / account.worker_s
    table = [
        f"  {row.label:<{width}}  {_signed(row.seconds * per_worker):>12}  {formatting.percent(row.share):>6}"
        for row in rows
    ]
    lines = [f"{label}: {text}" for label, text in bill(account, price, device, item)]
    if account.num_read < account.num_ranks and not account.rows.get(STRAGGLER):
        table.append("  (as rank 0 saw it: waiting for the slowest rank counts as useful; a report tells it apart)")
    return [*lines, *table]


def _signed(seconds: float) -> str:
    return formatting.duration(seconds) if seconds >= 0 else f"-{formatting.duration(-seconds)}"

"""Writes the section of a report about goodput and cost. Pure: an account in, a section of markdown out."""

from __future__ import annotations

from closeranks.facts.prices import DevicePrice
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.account_text import account_rows, bill
from closeranks.telemetry.goodput.time_account import TimeAccount


def goodput_section(
    account: TimeAccount, price: DevicePrice | None, device: str, item: str, note: str = "", plot: str = ""
) -> str:
    """Where the time of all workers went, and what it cost, below the ``plot`` of both; empty if nothing was recorded.
    ``note``: about prices."""
    rows = account_rows(account)
    if not rows:
        return ""
    table = [
        "| | worker-seconds | share |",
        "|---|---|---|",
        *(f"| {row.label} | {row.seconds:.2f} | {_percent(row.share)} |" for row in rows),
        f"| workers × wall time | {account.worker_s:.2f} | 100% |",
    ]
    figures = [f"- **{label}**: {text}" for label, text in bill(account, price, device, item)]
    read = ""
    if account.num_read < account.num_ranks:
        read = f"From the records of {account.num_read} of {account.num_ranks} ranks, evenly spread; others are alike."
    picture = [f"![Where the time of the workers went, and what it cost]({plot})", ""] if plot else []
    return "\n".join(
        ["## Goodput and cost", "", *picture, *figures, "", *table, *(["", read] if read else []), *_noted(note)]
    )


def _noted(note: str) -> list[str]:
    return ["", f"Note: {note}"] if note else []


def _percent(share: float) -> str:
    return formatting.percent(share) if share >= 0 else f"-{formatting.percent(-share)}"

"""Reports a drill: as a table on a terminal, a page, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from closeranks.lab.drills.fault_results import DrillResult, FaultResult
from closeranks.telemetry.terminal_table import print_table

HEADINGS = ("fault", "detected in", "back in", "steps redone", "state equal", "what was done")


def table_cells(row: FaultResult, tolerance: float) -> tuple[str, ...]:
    """One line of the table, with a dash for a missing value."""
    equal = "no" if not row.equal else f"to {tolerance:g}" if tolerance else "yes"
    redone = "-" if row.num_redone is None else str(row.num_redone)
    survived = "" if row.survived else "LOST: "
    return row.fault, _seconds(row.detected_s), _seconds(row.back_s), redone, equal, f"{survived}{row.note}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def print_summary(summary: DrillResult) -> None:
    lines = [table_cells(row, summary.tolerance) for row in summary.rows]
    print_table(HEADINGS, lines, right=("detected in", "back in", "steps redone"), droppable=("what was done",))


def write_report(folder: Path, summary: DrillResult, facts: Mapping[str, Any]) -> None:
    """Write ``drill.json`` and ``drill.md``."""
    rows = [asdict(row) for row in summary.rows]
    fields = {**facts, "passed": summary.has_passed, "sentence": summary.sentence, "rows": rows}
    fields |= {"losses_equal": summary.losses, "state_difference": summary.state, "samples_equal": summary.samples}
    fields |= {"tolerance": summary.tolerance, "failure": summary.failure}
    (folder / "drill.json").write_text(json.dumps(fields, indent=1) + "\n")
    (folder / "drill.md").write_text(markdown_page(summary, facts))


def markdown_page(summary: DrillResult, facts: Mapping[str, Any]) -> str:
    head = f"# Drill of {facts['job']} on {facts['num_workers']} workers\n\n{summary.sentence}\n"
    table = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    table += ["| " + " | ".join(table_cells(row, summary.tolerance)).replace("\n", " ") + " |" for row in summary.rows]
    again = f"Again: `{facts['command']}`\n"
    why = f"\nWhy the run ended:\n\n```\n{summary.failure}\n```\n" if summary.failure else ""
    return "\n".join([head, *table, "", again]) + why

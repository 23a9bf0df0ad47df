"""Formats the table of a comparison as text. Pure.

Invariant: a column is shown only if some setting has a figure for it; a cell without one says why in a word.
"""

from __future__ import annotations

from typing import Any

from closeranks.lab.compare.result_table import ResultTable, RunStat, SettingRow
from closeranks.telemetry.formatting import brief, duration, number, size

_NONE = "-"


def headings_and_cells(table: ResultTable) -> tuple[list[str], list[list[str]]]:
    """The table as text, without empty columns."""
    goal = f"to {table.metric} {brief(table.target)}" if table.target is not None else "to the target"
    final = f"final {table.metric}"
    named = [_cells(table, row, goal, final) for row in table.rows]
    shown = [name for name in named[0] if any(cells[name] not in ("", _NONE) for cells in named)]
    if table.target is not None and goal not in shown:
        shown.insert(1, goal)
    return shown, [[cells[name] for name in shown] for cells in named]


def _cells(table: ResultTable, row: SettingRow, goal: str, final: str) -> dict[str, str]:
    base = row is table.baseline
    return {
        "setting": row.name,
        "workers": str(row.num_workers) if any(one.num_workers != row.num_workers for one in table.rows) else "",
        "steps/s": _with_spread(row.steps_per_s, brief),
        "x": _times(row.rate_ratio, base),
        "staleness": brief(row.staleness.mean) if row.staleness and _is_stale(table) else _NONE,
        "bytes/step": size(row.bytes_per_step.mean) if row.bytes_per_step else _NONE,
        "training": _with_spread(row.seconds, duration) if not table.is_timed else "",
        goal: _target_cell(table, row),
        "speed-up": _NONE if base else _with_spread(row.speedup, _ratio),
        final: _with_spread(row.final, number),
        "above baseline": _NONE if base or row.final_gap is None else _with_spread(row.final_gap, _signed),
        "memory": size(row.memory_bytes.mean) if row.memory_bytes else _NONE,
        "cost": brief(row.cost.mean) if row.cost else _NONE,
        "cost to target": brief(row.cost_to_target.mean) if row.cost_to_target else _NONE,
        "note": row.reason,
    }


def _is_stale(table: ResultTable) -> bool:
    return any(row.staleness is not None and row.staleness.mean > 0 for row in table.rows)


def _target_cell(table: ResultTable, row: SettingRow) -> str:
    if table.target is None or not row.num_sound:
        return _NONE
    if row.seconds_to_target is not None:
        return _with_spread(row.seconds_to_target, duration)
    return "not reached" if not row.num_reached else f"reached by {row.num_reached} of {row.num_sound}"


def _with_spread(stat: RunStat | None, text_of: Any) -> str:
    if stat is None:
        return _NONE
    return f"{text_of(stat.mean)} ± {text_of(stat.spread).lstrip('+')}" if stat.num > 1 else str(text_of(stat.mean))


def _signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) >= 0.0001 or value == 0 else f"{value:+.1e}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _times(value: float | None, is_baseline: bool) -> str:
    return _NONE if value is None or is_baseline else f"{value:.2f}x"

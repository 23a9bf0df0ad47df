"""When is a difference between two settings one? Pure.

Invariant: what lies within the spread of the runs, or is too small for anybody to act on, is no difference.
"""

from __future__ import annotations

from closeranks.lab.compare.result_table import ResultTable, RunStat, SettingRow

CLEAR = 0.02
"""Less than two percent is no gain that anybody would change a job for."""
_SAME = 0.001
"""Final figures that differ by less than this share are the same to anybody, however small their spread."""


def is_faster(ratio: RunStat | None) -> bool:
    """Than the baseline, by more than the ratios of the seeds lie apart."""
    return ratio is not None and ratio.mean - 1 > max(ratio.spread, CLEAR)


def is_slower(ratio: RunStat | None) -> bool:
    return ratio is not None and 1 - ratio.mean > max(ratio.spread, CLEAR)


def is_same(gap: RunStat, base: SettingRow) -> bool:
    least = _SAME * abs(base.final.mean) if base.final is not None else 0.0
    return abs(gap.mean) <= max(gap.spread, least)


def is_better(table: ResultTable, row: SettingRow) -> bool:
    gap = row.final_gap
    return gap is not None and not is_same(gap, table.baseline) and (gap.mean > 0) == table.rises


def is_worse(table: ResultTable, row: SettingRow) -> bool:
    gap = row.final_gap
    return gap is None or (not is_same(gap, table.baseline) and (gap.mean > 0) != table.rises)

"""From runs to rows, and from rows to the cells of a table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from closeranks.lab.compare.config import ComparisonTarget
from closeranks.lab.compare.report import _finite
from closeranks.lab.compare.result_table import RunStat
from closeranks.lab.compare.run_outcome import DIVERGED
from closeranks.lab.compare.table_text import headings_and_cells
from tests.cli.compare.outcomes import compared, runs


def test_a_row_has_means_spreads_and_ratios() -> None:
    table = compared(
        runs("plain", 40.0, 60.0, bytes_per_step=1000.0),
        runs("top-k", 10.0, 10.0, steps_per_s=8.0, bytes_per_step=10.0),
    )
    plain, topk = table.rows
    assert plain.seconds_to_target == RunStat(50.0, pytest.approx(14.142, abs=1e-3), 40.0, 60.0, 2)
    assert topk.speedup == RunStat(5.0, pytest.approx(1.414, abs=1e-3), 4.0, 6.0, 2)
    assert (topk.rate_ratio, topk.bytes_ratio) == (4.0, 0.01)


def test_the_gap_is_taken_seed_by_seed() -> None:
    """Seeds lie far apart, the settings do not."""
    table = compared(runs("plain", 1.0, 1.0, finals=(1.0, 5.0)), runs("other", 1.0, 1.0, finals=(1.5, 5.5)))
    assert table.rows[1].final_gap == RunStat(0.5, 0.0, 0.5, 0.5, 2)
    assert table.rows[1].final is not None
    assert table.rows[1].final.spread > 2


def test_a_target_that_one_seed_misses_is_not_reached() -> None:
    table = compared(runs("plain", 40.0, 60.0), runs("other", 10.0, None))
    other = table.rows[1]
    assert (other.seconds_to_target, other.num_reached, other.speedup) == (None, 1, None)
    headings, cells = headings_and_cells(table)
    assert cells[1][headings.index("to loss 2.00")] == "reached by 1 of 2"


def test_what_did_not_finish_weighs_nothing_and_says_why() -> None:
    good, bad = runs("other", 10.0, 99.0)
    bad = replace(bad, state=DIVERGED, reason="its loss is not finite from step 4", final_loss=float("nan"))
    other = compared(runs("plain", 40.0, 60.0), [good, bad]).rows[1]
    assert (other.num_sound, other.is_sound) == (1, False)
    assert other.reason == "diverged in 1 of 2 runs: its loss is not finite from step 4"
    assert other.final == RunStat(1.9, 0.0, 1.9, 1.9, 1)


def test_columns_without_a_figure_are_left_out() -> None:
    headings, _ = headings_and_cells(compared(runs("plain", None), runs("other", None), target=None))
    assert headings == ["setting", "steps/s", "x", "training", "final loss", "above baseline"]
    headings, cells = headings_and_cells(compared(runs("plain", None), runs("other", None)))
    assert "to loss 2.00" in headings, "a target was asked for"
    assert [row[headings.index("to loss 2.00")] for row in cells] == ["not reached", "not reached"]


def test_strict_json_holds_what_is_not_finite_as_null() -> None:
    assert json.dumps(_finite({"a": [float("nan"), 1.0], "b": (float("inf"),)}), allow_nan=False) == (
        '{"a": [null, 1.0], "b": [null]}'
    )


def test_what_is_not_a_number_is_in_no_mean() -> None:
    assert RunStat.of([1.0, float("nan"), 3.0, float("inf"), None]) == RunStat(
        2.0, pytest.approx(1.414, abs=1e-3), 1.0, 3.0, 2
    )
    assert RunStat.of([float("nan")]) is None


def test_final_figures_are_all_of_evaluations_or_all_of_training() -> None:
    evaluated = [replace(one, eval_loss=9.0) for one in runs("plain", 1.0, 1.0)]
    table = compared(evaluated, runs("other", 1.0, 1.0))
    assert not table.is_evaluated
    assert table.rows[1].final_gap == RunStat(0.0, 0.0, 0.0, 0.0, 2), "a training loss against a training loss"
    both = compared(evaluated, [replace(one, eval_loss=9.5) for one in runs("other", 1.0, 1.0)])
    assert both.is_evaluated
    assert both.rows[1].final_gap == RunStat(0.5, 0.0, 0.5, 0.5, 2)


def test_a_metric_is_of_evaluations_only_where_all_have_it_there() -> None:
    target = ComparisonTarget(metric="accuracy", value=0.9)
    one = [replace(run, metrics={"accuracy": 0.8}, eval_loss=1.0) for run in runs("plain", 1.0)]
    two = [replace(run, metrics={"accuracy": 0.9}, eval_metrics={"accuracy": 0.5}) for run in runs("other", 1.0)]
    table = compared(one, two, target=target)
    assert not table.is_evaluated
    assert [row.final.mean for row in table.rows if row.final] == [0.8, 0.9]

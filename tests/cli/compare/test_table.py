"""From runs to rows, and from rows to one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from closeranks.cli.compare.advice import advise
from closeranks.cli.compare.config import Budget, Compare, Setting, Target
from closeranks.cli.compare.reading import DIVERGED, FAILED, FINISHED, Outcome
from closeranks.cli.compare.table import Stat, Table, make_table
from closeranks.cli.compare.writing import _finite, headings_and_cells

TARGET = Target(value=2.0)


def runs(setting: str, *to_target: float | None, finals: tuple[float, ...] = (), **more: Any) -> list[Outcome]:
    """One run for each time; the final losses differ by seed."""
    finals = finals or tuple(1.9 + 0.1 * seed for seed in range(len(to_target)))
    return [
        Outcome(setting, seed, 0, 2, **{"state": FINISHED, "seconds": 100.0, "steps_per_s": 2.0, **more},
                seconds_to_target=at_s, final_loss=final)
        for seed, (at_s, final) in enumerate(zip(to_target, finals, strict=True))
    ]  # fmt: skip


def compared(*groups: list[Outcome], target: Target | None = TARGET, budget: Budget | None = None) -> Table:
    settings = tuple(Setting(name=group[0].setting) for group in groups)
    compare = Compare(job="job.toml", setting=settings, target=target, budget=budget or Budget())
    return make_table(compare, [one for group in groups for one in group])


# --- rows


def test_a_row_has_means_spreads_and_ratios() -> None:
    table = compared(
        runs("plain", 40.0, 60.0, bytes_per_step=1000.0),
        runs("top-k", 10.0, 10.0, steps_per_s=8.0, bytes_per_step=10.0),
    )
    plain, topk = table.rows
    assert plain.seconds_to_target == Stat(50.0, pytest.approx(14.142, abs=1e-3), 40.0, 60.0, 2)
    assert topk.speedup == Stat(5.0, pytest.approx(1.414, abs=1e-3), 4.0, 6.0, 2)
    assert (topk.rate_ratio, topk.bytes_ratio) == (4.0, 0.01)


def test_the_gap_is_taken_seed_by_seed() -> None:
    """Seeds lie far apart, the settings do not."""
    table = compared(runs("plain", 1.0, 1.0, finals=(1.0, 5.0)), runs("other", 1.0, 1.0, finals=(1.5, 5.5)))
    assert table.rows[1].final_gap == Stat(0.5, 0.0, 0.5, 0.5, 2)
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
    bad = replace(bad, state=DIVERGED, reason="its loss is not finite since step 4", final_loss=float("nan"))
    other = compared(runs("plain", 40.0, 60.0), [good, bad]).rows[1]
    assert (other.num_sound, other.is_sound) == (1, False)
    assert other.reason == "diverged in 1 of 2 runs: its loss is not finite since step 4"
    assert other.final == Stat(1.9, 0.0, 1.9, 1.9, 1)


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


# --- advice, with a target

PLAIN = runs("plain", 230.0, 232.0)


def test_the_fastest_is_recommended_with_what_it_loses() -> None:
    table = compared(PLAIN, runs("top-k", 40.0, 42.0, finals=(1.93, 2.02)), runs("slow", 300.0, 301.0))
    assert advise(table) == (
        "Use top-k: it reaches loss 2.00 in 41 s instead of 3 min 51 s (5.6x), "
        "at a final loss 0.0250 higher than plain (spread 0.00707)."
    )


def test_the_same_loss_within_the_spread_is_called_the_same() -> None:
    table = compared(PLAIN, runs("top-k", 40.0, 42.0, finals=(1.95, 1.96)))
    assert "with the same final loss as plain (difference 0.00500, spread 0.0636)." in advise(table)


def test_who_gains_as_much_is_named() -> None:
    said = advise(compared(PLAIN, runs("top-k", 40.0, 42.0), runs("local", 42.0, 41.0), runs("half", 100.0, 100.0)))
    assert said.startswith("Use top-k: it reaches loss 2.00 in 41 s")
    assert said.endswith("with the same final loss as plain (local: no clear difference from it).")


def test_one_seed_has_no_spread() -> None:
    said = advise(compared(runs("plain", 100.0), runs("top-k", 40.0, finals=(2.5,))))
    assert said.endswith("at a final loss 0.600 higher than plain (one run each: no spread is known).")


def test_a_difference_within_the_spread_changes_nothing() -> None:
    said = advise(compared(runs("plain", 90.0, 110.0), runs("top-k", 95.0, 95.0)))
    assert said == (
        "Stay with plain: it reaches loss 2.00 in 1 min 40 s, top-k in 1 min 35 s, "
        "and that is no clear difference (seed by seed 1.05x, spread 0.15)."
    )


def test_seeds_that_lie_far_apart_hide_no_difference() -> None:
    said = advise(compared(runs("plain", 40.0, 400.0), runs("top-k", 20.0, 200.0)))
    assert said.startswith("Use top-k: it reaches loss 2.00 in 1 min 50 s instead of 3 min 40 s (2.0x)")


def test_the_baseline_may_be_first_or_alone() -> None:
    assert advise(compared(PLAIN, runs("slow", 300.0, 301.0))) == (
        "Stay with plain: it reaches loss 2.00 first, in 3 min 51 s; the next is slow with 5 min 0 s."
    )
    said = advise(compared(PLAIN, runs("other", None, 20.0)))
    assert said == "Stay with plain: it alone reaches loss 2.00, in 3 min 51 s."


def test_a_baseline_that_does_not_get_there() -> None:
    said = advise(compared(runs("plain", None, 10.0), runs("other", 20.0, 20.0)))
    assert said == "Use other: it reaches loss 2.00 in 20 s, plain does not get there."


def test_nobody_gets_there() -> None:
    said = advise(compared(runs("plain", None, None), runs("other", None, None, finals=(1.0, 1.1))))
    assert said.startswith("No setting reaches loss 2.00 with every seed: use other: within the budget it ends at")


def test_what_diverged_or_failed_is_never_recommended_and_named() -> None:
    wild = runs("wild", 1.0, 1.0, state=DIVERGED, reason="its loss is not finite since step 4")
    broken = runs("broken", None, None, state=FAILED, reason="no disk")
    said = advise(compared(PLAIN, wild, broken))
    assert said == "Stay with plain: it alone reaches loss 2.00, in 3 min 51 s; wild diverged, broken failed."
    assert advise(compared(wild, broken)) == "No setting can be recommended: wild diverged, broken failed."
    assert advise(compared(broken, PLAIN)) == (
        "Use plain: it reaches loss 2.00 in 3 min 51 s, broken does not finish; broken failed."
    )


def test_accuracy_rises() -> None:
    target = Target(metric="accuracy", value=0.9)
    low = [replace(one, metrics={"accuracy": 0.95}) for one in PLAIN]
    high = [replace(one, metrics={"accuracy": 0.97}) for one in runs("other", None, None)]
    table = compared(low, high, target=target)
    assert table.rises
    assert advise(table) == "Stay with plain: it alone reaches accuracy 0.900, in 3 min 51 s."
    none = [replace(one, seconds_to_target=None) for one in low]
    assert "use other: within the budget it ends at training accuracy 0.970" in advise(
        compared(none, high, target=target)
    )


# --- advice, without one


def test_without_a_target_the_faster_one_that_learns_as_much() -> None:
    same = compared(runs("plain", None, None), runs("quick", None, None, seconds=50.0), target=None)
    assert advise(same) == (
        "Use quick: it trains in 50 s instead of 1 min 40 s (2.0x), with the same final loss as plain."
    )
    worse = runs("quick", None, None, seconds=50.0, finals=(2.4, 2.5))
    assert advise(compared(runs("plain", None, None), worse, target=None)) == (
        "Stay with plain: quick trains in 50 s instead of 1 min 40 s (2.0x), "
        "but ends at a final loss 0.500 higher than plain (spread 0.00)."
    )


def test_without_a_target_and_no_faster_the_better_one() -> None:
    better = runs("large", None, None, finals=(1.0, 1.1), seconds=120.0)
    said = advise(compared(runs("plain", None, None), better, target=None))
    assert said.startswith(
        "Use large: with the same number of steps it ends at training loss 1.05, at a final loss 0.9"
    )
    same = compared(runs("plain", None, None), runs("other", None, None), target=None)
    assert advise(same) == "Stay with plain: no other setting is clearly faster or ends clearly better."


def test_with_the_same_time_for_all_the_one_that_comes_furthest() -> None:
    better = runs("quick", None, None, finals=(1.0, 1.1))
    table = compared(runs("plain", None, None), better, target=None, budget=Budget(seconds=60.0))
    assert advise(table).startswith("Use quick: in the same time it ends at training loss 1.05")

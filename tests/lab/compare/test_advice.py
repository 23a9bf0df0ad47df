"""From rows to one sentence: what is recommended, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

from closeranks.lab.compare.advice import advise
from closeranks.lab.compare.config import ComparisonBudget, ComparisonTarget
from closeranks.lab.compare.run_outcome import DIVERGED, FAILED
from tests.cli.compare.outcomes import compared, runs

# --- advice, with a target

PLAIN = runs("plain", 230.0, 232.0)


def test_the_fastest_is_recommended_with_what_it_loses() -> None:
    table = compared(PLAIN, runs("top-k", 40.0, 42.0, finals=(1.93, 2.02)), runs("slow", 300.0, 301.0))
    assert advise(table) == (
        "Use top-k: it reaches loss 2.00 in 41 s instead of 3 min 51 s (5.6x), "
        "at a final loss 0.0250 higher than plain (spread 0.00707)."
    )


def test_a_lucky_mean_hides_no_clear_gain() -> None:
    """A is faster in the mean, but its seeds lie too far apart to tell."""
    said = advise(compared(runs("plain", *[100.0] * 3), runs("A", 20.0, 60.0, 70.0), runs("B", 51.0, 52.0, 50.0)))
    assert said.startswith("Use B: it reaches loss 2.00 in 51 s instead of 1 min 40 s (2.0x)")


def test_a_small_gain_is_told_with_two_digits() -> None:
    assert "(1.04x)" in advise(compared(runs("plain", 104.0, 104.0), runs("quick", 100.0, 100.0)))


def test_more_workers_and_a_longer_budget_are_told() -> None:
    four = runs("four", 50.0, 50.0, num_workers=4, seconds=150.0)
    assert advise(compared(runs("plain", 100.0, 100.0), four)) == (
        "Use four: it reaches loss 2.00 in 50 s instead of 1 min 40 s (2.0x), with the same final loss as plain, "
        "but the whole budget takes 2 min 30 s instead of 1 min 40 s, on 4 workers instead of 2."
    )
    worse = runs("four", 50.0, 50.0, num_workers=4, finals=(2.4, 2.5))
    assert advise(compared(runs("plain", None, None), worse)) == (
        "Use four: it reaches loss 2.00 in 50 s, plain does not get there, "
        "but it ends at a final loss 0.500 higher than plain (spread 0.00), on 4 workers instead of 2."
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
    assert said.endswith("at a final loss 0.600 higher than plain; one run each: spread unknown.")
    same = advise(compared(runs("plain", 100.0), runs("top-k", 40.0)))
    assert same.endswith("with the same final loss as plain; one run each: spread unknown.")
    stays = advise(compared(runs("plain", 100.0), runs("top-k", 99.0)))
    assert stays.endswith("and that is no clear difference (1.01x); one run each: spread unknown.")
    broken = runs("broken", None, state=FAILED, reason="no disk")
    assert advise(compared(runs("plain", 100.0), broken)).endswith("one run each: spread unknown; broken failed.")
    for target, budget in ((None, None), (None, ComparisonBudget(seconds=60.0))):
        said = advise(compared(runs("plain", None), runs("other", None), target=target, budget=budget))
        assert said.endswith("; one run each: spread unknown.")


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
    assert said == "Stay with plain: it alone reaches loss 2.00 with every seed, in 3 min 51 s."


def test_a_baseline_that_does_not_get_there() -> None:
    said = advise(compared(runs("plain", None, None), runs("other", 20.0, 20.0)))
    assert said == "Use other: it reaches loss 2.00 in 20 s, plain does not get there."
    said = advise(compared(runs("plain", None, 10.0, 10.0), runs("other", 20.0, 20.0, 20.0)))
    assert said == "Use other: it reaches loss 2.00 in 20 s, plain gets there with 2 of 3 seeds."
    twice = [replace(one, seed=0, repeat=one.seed) for one in runs("plain", None, 10.0)]
    said = advise(compared(twice, runs("other", 20.0, 20.0)))
    assert said == "Use other: it reaches loss 2.00 in 20 s, plain gets there with 1 of 2 runs."


def test_nobody_gets_there() -> None:
    said = advise(compared(runs("plain", None, None), runs("other", None, None, finals=(1.0, 1.1))))
    assert said.startswith("No setting reaches loss 2.00 with every seed: use other: within the budget it ends at")


def test_what_diverged_or_failed_is_never_recommended_and_named() -> None:
    wild = runs("wild", 1.0, 1.0, state=DIVERGED, reason="its loss is not finite from step 4")
    broken = runs("broken", None, None, state=FAILED, reason="no disk")
    said = advise(compared(PLAIN, wild, broken))
    assert said == "Stay with plain: it alone reaches loss 2.00, in 3 min 51 s; wild diverged, broken failed."
    assert advise(compared(wild, broken)) == "No setting can be recommended: wild diverged, broken failed."
    assert advise(compared(broken, PLAIN)) == (
        "Use plain: it reaches loss 2.00 in 3 min 51 s, broken does not finish; broken failed."
    )


def test_accuracy_rises() -> None:
    target = ComparisonTarget(metric="accuracy", value=0.9)
    low = [replace(one, metrics={"accuracy": 0.95}) for one in PLAIN]
    high = [replace(one, metrics={"accuracy": 0.97}) for one in runs("other", None, None)]
    table = compared(low, high, target=target)
    assert table.higher_is_better
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
    assert said.endswith("lower than plain (spread 0.00), but takes 2 min 0 s instead of 1 min 40 s.")
    same = compared(runs("plain", None, None), runs("other", None, None), target=None)
    assert advise(same) == "Stay with plain: no other setting is clearly faster or ends clearly better."


def test_with_the_same_time_for_all_the_one_that_comes_furthest() -> None:
    better = runs("quick", None, None, finals=(1.0, 1.1))
    table = compared(runs("plain", None, None), better, target=None, budget=ComparisonBudget(seconds=60.0))
    assert advise(table).startswith("Use quick: in the same time it ends at training loss 1.05")


def test_a_lucky_mean_hides_no_clearly_better_end() -> None:
    plain, lucky = runs("plain", *[None] * 3, finals=(2.0,) * 3), runs("A", *[None] * 3, finals=(1.0, 1.9, 2.1))
    better = runs("B", *[None] * 3, finals=(1.8, 1.81, 1.79))
    timed = advise(compared(plain, lucky, better, target=None, budget=ComparisonBudget(seconds=60.0)))
    assert timed.startswith("Use B: in the same time it ends at training loss 1.80")
    assert "instead of" not in timed
    assert advise(compared(plain, lucky, better, target=None)).startswith(
        "Use B: with the same number of steps it ends"
    )


def test_one_that_is_faster_and_worse_hides_no_better_one() -> None:
    hasty = runs("hasty", None, None, seconds=50.0, finals=(3.0, 3.1))
    better = runs("large", None, None, seconds=200.0, finals=(1.0, 1.1))
    said = advise(compared(runs("plain", None, None), hasty, better, target=None))
    assert said.startswith("Use large: ")
    assert said.endswith("but takes 3 min 20 s instead of 1 min 40 s.")


def test_epochs_of_another_batch_are_another_number_of_steps() -> None:
    plain = runs("plain", None, None, num_steps=200)
    large = runs("large", None, None, num_steps=100, finals=(1.0, 1.1))
    assert advise(compared(plain, large, target=None)).startswith("Use large: with 100 steps instead of 200 it ends at")
    quick = runs("quick", None, None, num_steps=100, seconds=50.0)
    said = advise(compared(plain, quick, target=None))
    assert "in 50 s instead of 1 min 40 s (2.0x) with 100 steps instead of 200, with the same final loss" in said

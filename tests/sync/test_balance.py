"""Shares of workers of different speeds: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.sampling.batch_schedule import BatchSchedule
from closeranks.sync.balance import GAIN, best_shares, even_shares, levelled, rebalanced, step_seconds

speeds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@given(speeds, st.integers(1, 3), st.integers(0, 40))
def test_shares_add_up_and_nobody_goes_without(seconds: list[float], width: int, more: int) -> None:
    num_micro = len(seconds) * width + more
    even = even_shares(num_micro, len(seconds), width)
    now = rebalanced(even, seconds, width)
    assert sum(now) == sum(even) == num_micro
    assert min(now) >= width
    if now != even:
        assert step_seconds(even, seconds, width) > GAIN * step_seconds(now, seconds, width)
    assert rebalanced(now, seconds, width) == now  # at rest


@given(speeds, st.integers(0, 20))
def test_no_other_shares_are_done_earlier(seconds: list[float], more: int) -> None:
    best = best_shares(len(seconds) + more, seconds, 1)
    for giver in range(len(best)):
        for taker in range(len(best)):
            if giver != taker and best[giver] > 1:
                other = [share + (at == taker) - (at == giver) for at, share in enumerate(best)]
                assert step_seconds(best, seconds, 1) <= step_seconds(other, seconds, 1) * (1 + 1e-12)


def test_a_replica_of_half_the_speed_has_half_the_work() -> None:
    assert rebalanced((6, 6), [1.0, 2.0], 1) == (8, 4)
    assert rebalanced((6, 6), [1.0, 1.05], 1) == (6, 6)
    assert rebalanced((8, 4), [1.0, 1.0], 1) == (6, 6)
    assert rebalanced((6, 6), [0.0, 2.0], 1) == (6, 6)  # one was not measured
    assert rebalanced((1, 1), [1.0, 9.0], 1) == (1, 1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.booleans(), st.data())
def test_every_micro_batch_is_taken_once(num: int, width: int, more: int, even: bool, data: st.DataObject) -> None:
    num_micro = num * width + more
    schedule = BatchSchedule.for_steps(1000, num_micro, 1, 3)
    ranks = range(num * width)
    plain = [schedule.assigned(1, rank, len(ranks)) for rank in ranks]
    counts = tuple(sum(map(len, plain[width * number : width * (number + 1)])) for number in range(num))
    assert counts == even_shares(num_micro, num, width)
    seconds = data.draw(st.lists(st.floats(0.1, 5.0), min_size=num, max_size=num))
    shares = best_shares(num_micro, seconds, width)
    dealt = [schedule.assigned(1, rank, len(ranks), even=even, shares=shares) for rank in ranks]
    taken = [one.index for own in dealt for one in own if not one.is_padding]
    assert taken == list(range(num_micro))
    for number in range(num):
        sizes = {len(own) for own in dealt[width * number : width * (number + 1)]}
        assert len(sizes) == 1 or (not even and max(sizes) - min(sizes) == 1)  # within a replica alone


@given(
    st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6),
    st.integers(0, 60),
    st.integers(0, 3),
    st.lists(st.lists(st.floats(0.953, 1.047), min_size=6, max_size=6), min_size=1, max_size=40),
)
def test_noise_of_a_twentieth_never_moves_the_best_shares(
    seconds: list[float], more: int, fill: int, noise: list[list[float]]
) -> None:
    shares = best_shares(len(seconds) + more, seconds, fill=fill)
    for factors in noise:
        measured = [one * factor for one, factor in zip(seconds, factors, strict=False)]
        assert rebalanced(shares, measured, fill=fill) == shares


def test_ranks_of_about_the_same_speed_get_the_same_share() -> None:
    measured = [1.06, 1.0, 0.94, 4.4]
    assert best_shares(32, measured) == (9, 10, 11, 2)
    assert rebalanced((8, 8, 8, 8), measured) == (10, 10, 10, 2)
    assert rebalanced((8, 8, 8, 8), [1.3, 1.0, 0.8, 4.4]) == best_shares(32, [1.3, 1.0, 0.8, 4.4])  # not alike
    assert levelled([1.0, 4.0, 1.1]) == [1.05, 4.0, 1.05]


def _decisions(speeds: Iterable[Sequence[float]], start: tuple[int, ...], seed: int) -> list[tuple[int, ...]]:
    """The shares after each decision, over windows of 20 steps whose single times vary by 30%."""
    random, shares, found = Random(seed), start, []
    for seconds in speeds:
        measured = [median(one * random.uniform(1.0, 1.3) for _ in range(20)) for one in seconds]
        shares = rebalanced(shares, measured)
        found.append(shares)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_shares_settle_at_once_and_stay_over_300_steps_of_noise(seed: int) -> None:
    found = _decisions([[1.0, 1.0, 1.0, 4.0]] * 15, even_shares(32, 4), seed)
    assert found[0][3] in (2, 3)
    assert all(one == other for one, other in pairwise(found))
    assert step_seconds(found[-1], [1.0, 1.0, 1.0, 4.0]) <= 12.0  # of 32 when all took eight


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_recovers_gets_its_part_back(seed: int) -> None:
    found = _decisions([[1.0, 1.0, 1.0, 4.0]] * 3 + [[1.0] * 4] * 3, even_shares(32, 4), seed)
    assert max(found[2]) > 8
    assert step_seconds(found[-1], [1.0] * 4) <= 9.0


def test_a_pipeline_that_fills_takes_longer_than_its_micro_batches() -> None:
    assert best_shares(12, [1.0, 2.0]) == (8, 4)
    assert best_shares(12, [1.0, 2.0], fill=3) == (9, 3)
    assert step_seconds((9, 3), [1.0, 2.0], fill=3) == 12.0


def test_a_short_micro_batch_counts() -> None:
    schedule = BatchSchedule.for_steps(1000, 12, 2, 3)
    assert schedule.micro_batches_per_step == 6
    assert BatchSchedule.for_steps(1000, 13, 2, 3).micro_batches_per_step == 7

"""Draws per source are within one of weight times position, at every prefix, from wherever one looks."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.data.sampling import mixture_order
from closeranks.data.sampling.mixture_order import MixtureOrder, WeightedInterleave
from closeranks.data.sampling.order import FullOrder, SequentialOrder

# Equal, lopsided, and hardly commensurable weights; up to a dozen of them.
weights = st.lists(st.integers(1, 12) | st.integers(1, 500) | st.integers(980, 1000), min_size=1, max_size=12)


def assert_within_one(turns: WeightedInterleave, first: int, length: int) -> None:
    """In whole numbers: |draws - share * positions| < 1 before and after every draw, and draws are counted through."""
    parts, draws = turns.at(np.arange(first, first + length))
    total = turns.total
    for part, weight in enumerate(turns.weights):
        own = np.flatnonzero(parts == part)
        for place, draw in zip((first + own).tolist(), draws[own].tolist(), strict=True):
            assert abs(draw * total - weight * place) < total
            assert abs((draw + 1) * total - weight * (place + 1)) < total
        assert (np.diff(draws[own]) == 1).all()


@given(weights, st.just(0) | st.integers(0, 10**6) | st.integers(0, 10**15))
@example([45, 45, 4, 3, 3], 0)
@example([1], 10**12)
def test_draws_are_within_one_of_their_share_at_every_prefix(several: list[int], first: int) -> None:
    """Windows cross the seams between stretches, where the walk begins anew."""
    turns = WeightedInterleave.of([float(weight) for weight in several])
    seam = (first // turns.chunk_size + 1) * turns.chunk_size
    assert_within_one(turns, max(0, seam - 600), 1200)


@given(weights, st.integers(1, 60), st.integers(0, 10**9))
def test_any_position_can_be_begun_from(several: list[int], length: int, first: int) -> None:
    """The proof's claim itself: counts at two positions close together are joined by a walk that keeps every window."""
    turns = WeightedInterleave.of([float(weight) for weight in several])
    begun, done = mixture_order._counts(turns, first), mixture_order._counts(turns, first + length)
    assert sum(begun) == first
    parts = mixture_order._walk(turns, first, length, begun, done)
    assert (np.bincount(parts, minlength=len(several)) == np.array(done) - np.array(begun)).all()
    counts = list(begun)
    for place, part in enumerate(parts.tolist(), first + 1):
        counts[part] += 1
        for count, weight in zip(counts, turns.weights, strict=True):
            assert abs(count * turns.total - weight * place) < turns.total


@given(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6), st.integers(0, 10**12))
def test_weights_of_any_digits(several: list[float], first: int) -> None:
    """Against the weights as they were given, rounded or not."""
    turns = WeightedInterleave.of(several)
    parts, draws = turns.at(np.arange(first, first + 300))
    shares = [Fraction(weight) / sum(map(Fraction, several)) for weight in several]
    for place, part, draw in zip(range(first, first + 300), parts.tolist(), draws.tolist(), strict=True):
        assert abs(draw - shares[part] * place) < 2  # 1, and at most another at 1e12 positions
        if place < 10**9:
            assert abs(draw - shares[part] * place) <= 1 + Fraction(1, 100)


def test_simple_weights_are_kept_exactly() -> None:
    assert WeightedInterleave.of([0.5, 0.3, 0.2]).weights == (5, 3, 2)
    assert WeightedInterleave.of([0.1, 0.2, 0.7]).weights == (1, 2, 7)
    assert WeightedInterleave.of([3, 6]).weights == (1, 2)
    assert WeightedInterleave.of([123456789012, 23456789]).weights == (123456789012, 23456789)


def test_a_period_holds_exactly_its_weights() -> None:
    parts, _ = WeightedInterleave.of([0.5, 0.3, 0.2]).at(np.arange(50))
    for period in parts.reshape(5, 10):
        assert np.bincount(period).tolist() == [5, 3, 2]


def test_turns_never_change() -> None:
    parts, draws = WeightedInterleave.of([0.5, 0.3, 0.2]).at(np.arange(4090, 4106))
    assert parts.tolist() == PARTS
    assert draws.tolist() == DRAWS


def test_any_place_costs_the_same() -> None:
    turns = WeightedInterleave.of([0.61, 0.29, 0.0999, 0.0001])
    began = time.process_time()
    turns.at(np.array([10**14]))
    assert time.process_time() - began < 0.4  # 30 ms where nobody else computes


def test_a_weight_too_small_is_said() -> None:
    with pytest.raises(DataError, match=r"weight 1e-07 is less than a millionth of a mixture of 1"):
        WeightedInterleave.of([1.0, 1e-7])
    with pytest.raises(ValueError, match="above 0"):
        WeightedInterleave.of([1.0, 0.0])
    with pytest.raises(ValueError, match="2 parts"):
        MixtureOrder((SequentialOrder(3), SequentialOrder(4)), (1.0,))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=5), st.integers(0, 2**40))
def test_each_part_goes_through_its_own_order(parts: list[tuple[int, int]], seed: int) -> None:
    orders = tuple(FullOrder(size, seed + number) for number, (size, _) in enumerate(parts))
    mixture = MixtureOrder(orders, tuple(float(weight) for _, weight in parts))
    assert mixture.num_samples == sum(size for size, _ in parts)
    samples = mixture.between(0, 500)
    bounds = np.cumsum([0, *(size for size, _ in parts)])
    owners = np.searchsorted(bounds, samples, side="right") - 1
    for number, order in enumerate(orders):
        own = samples[owners == number] - bounds[number]
        assert np.array_equal(own, order.between(0, len(own)))


def test_effective_weights() -> None:
    assert MixtureOrder((SequentialOrder(3), SequentialOrder(4)), (3.0, 1.0)).effective_weights == (0.75, 0.25)


PARTS = [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
DRAWS = [2045, 1227, 2046, 818, 2047, 1228, 2048, 1229, 2049, 819, 2050, 1230, 2051, 820, 2052, 1231]

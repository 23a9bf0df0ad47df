"""Lengths that are counted, not kept, against numpy on all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.stats.length_histogram import LengthHistogram

few = st.lists(st.integers(0, 70_000), min_size=1, max_size=40)


@given(few, st.integers(1, 7), st.sampled_from([0.0, 0.25, 0.5, 0.95, 1.0]))
def test_counts_and_quantiles_equal_those_of_all_lengths(values: list[int], at_once: int, share: float) -> None:
    lengths = LengthHistogram()
    for first in range(0, len(values), at_once):
        lengths.add(np.array(values[first : first + at_once]))
    assert (lengths.count, lengths.total) == (len(values), sum(values))
    assert (lengths.shortest, lengths.longest) == (min(values), max(values))
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert lengths.quantile(share) == (exact if exact < 65536 else pytest.approx(exact, rel=0.011))


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40))
def test_bars_hold_every_length_once(values: list[int]) -> None:
    lengths = LengthHistogram()
    lengths.add(np.array(values))
    bars = lengths.bars()
    for bar in bars:
        assert bar.count == sum(bar.first <= value < bar.last for value in values)
    assert sum(bar.count for bar in bars) == len(values)


def test_nothing_is_nothing() -> None:
    lengths = LengthHistogram()
    lengths.add(np.zeros(0, dtype=np.int64))
    assert (lengths.count, lengths.bars(), lengths.quantile(0.5), lengths.mean) == (0, [], 0.0, 0.0)

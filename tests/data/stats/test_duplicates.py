"""Exact duplicates, with all digests kept and with a sample of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.stats.duplicates import DuplicateFinder


@given(st.lists(st.integers(0, 20), max_size=60))
def test_copies_are_counted_as_a_counter_would(values: list[int]) -> None:
    found = DuplicateFinder()
    for value in values:
        found.add([str(value).encode()])
    repeats = found.counts(num_named=100)
    counted = Counter(values)
    assert repeats.num_seen == repeats.num_kept == len(values)
    assert not repeats.is_sample
    assert repeats.num_repeated == len(values) - len(counted)
    assert repeats.most == max(counted.values(), default=0)
    assert repeats.first_copies == tuple(n for n, value in enumerate(values) if value in values[:n])


def test_a_sample_keeps_every_copy_of_what_it_keeps() -> None:
    """Each of 100,000 contents twice: whatever is in the sample is there twice, and the share stays one half."""
    found = DuplicateFinder(limit=5000)
    contents = np.arange(100_000, dtype=np.int64).repeat(2)
    found.add(value.tobytes() for value in contents)
    repeats = found.counts()
    assert repeats.num_seen == 200_000
    assert repeats.is_sample
    assert 1000 < repeats.num_kept <= 5000
    assert repeats.num_repeated * 2 == repeats.num_kept
    assert repeats.share == 0.5

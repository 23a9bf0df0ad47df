"""Words at named counters: pinned, independent of each other, and spread evenly."""

from __future__ import annotations

import numpy as np

from closeranks.core.counter_hash import uniform, words


def test_the_words_never_change() -> None:
    assert [int(word) for word in words(7, np.arange(2))] == PINNED
    assert words(7, np.arange(3)[:, None], np.arange(2)).shape == (3, 2)


def test_a_word_follows_from_its_counters_alone() -> None:
    whole = words(3, np.arange(50)[:, None], np.arange(4))
    assert np.array_equal(words(3, np.array([[17], [2]]), np.arange(4)), whole[[17, 2]])
    assert np.array_equal(words(3, np.array([17]), np.array([1])), whole[17, 1:2])


def test_keys_and_the_order_of_counters_matter() -> None:
    left, right = np.arange(40)[:, None], np.arange(40)
    assert len(np.unique(words(1, left, right))) == 1600
    assert not np.intersect1d(words(1, left, right), words(2, left, right)).size


def test_numbers_are_uniform() -> None:
    drawn = uniform(words(5, np.arange(100_000)))
    assert 0.0 <= drawn.min() < 1e-3
    assert 1.0 - 1e-3 < drawn.max() < 1.0
    counts = np.bincount((drawn * 20).astype(int), minlength=20)
    assert np.square(counts - 5000).sum() / 5000 < 43.8  # chi-square with 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01


PINNED = [7191089600892374487, 7259628554680249319]

"""A keyed permutation has an inverse, and many small ones at once are what they are one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.data.sampling.permutation import numbered_keys, permute, permute_each, unpermute

keys = st.integers(0, 2**63 - 1)


@given(st.integers(1, 3000), keys)
@example(1, 0)
@example(2, 7)
@example(1024, 3)
@example(1025, 3)
def test_unpermute_undoes_permute(size: int, key: int) -> None:
    everything = np.arange(size, dtype=np.uint64)
    assert np.array_equal(unpermute(permute(everything, size, key), size, key), everything)
    assert np.array_equal(permute(unpermute(everything, size, key), size, key), everything)


@given(st.integers(1, 2**62), keys, st.data())
def test_unpermute_undoes_permute_in_ranges_of_any_size(size: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)), dtype=np.uint64)
    assert np.array_equal(unpermute(permute(index, size, key), size, key), index)


@given(st.integers(1, 300), st.lists(keys, min_size=1, max_size=5))
def test_each_index_by_its_own_key(size: int, several: list[int]) -> None:
    index = np.tile(np.arange(size), len(several))
    own = np.repeat(np.array(several, dtype=np.uint64), size)
    expected = np.concatenate([permute(np.arange(size), size, key) for key in several])
    assert np.array_equal(permute_each(index, size, own), expected)


def test_numbered_keys_differ_by_number_and_by_key() -> None:
    numbers = np.arange(10_000)
    assert len(np.unique(np.concatenate([numbered_keys(key, numbers) for key in (0, 1, 2**62)]))) == 30_000


def test_numbered_permutations_never_change() -> None:
    """Block orders of running jobs rest on these."""
    assert numbered_keys(5, np.array([0, 1, 2])).tolist() == NUMBERED
    assert permute_each(np.arange(6), 6, numbered_keys(5, np.array([0, 0, 0, 0, 0, 0]))).tolist() == SIX


@pytest.mark.parametrize(("image", "size"), [(5, 5), (-1, 5), (0, 0)])
def test_an_image_outside_is_refused(image: int, size: int) -> None:
    with pytest.raises(ValueError, match="outside range"):
        unpermute(np.array([image]), size, 1)


NUMBERED = [13168350753275463132, 13213674757522680073, 13276149613355208603]
SIX = [3, 1, 0, 5, 2, 4]

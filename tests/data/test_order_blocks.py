"""Blocks: every sample once an epoch, whatever the sizes; what is read together lies together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.data.sampling.order import BlockOrder, FullOrder, SequentialOrder
from closeranks.data.sampling.permutation import sample_indices

small = st.integers(1, 40)
seeds = st.integers(0, 2**40)


@given(st.integers(1, 400), seeds, small, small)
@example(num_samples=1, seed=0, block=1, window=1)
@example(num_samples=5, seed=0, block=9, window=2)
@example(num_samples=12, seed=1, block=4, window=2)
@example(num_samples=13, seed=1, block=4, window=2)
def test_each_epoch_has_every_sample_once(num_samples: int, seed: int, block: int, window: int) -> None:
    order = BlockOrder(num_samples, seed, block, window)
    for epoch in order.between(0, 3 * num_samples).reshape(3, num_samples):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))


@given(st.integers(1, 400), seeds, small, st.integers(1, 10))
def test_a_window_takes_all_of_its_blocks_before_the_next_begins(
    num_samples: int, seed: int, block: int, window: int
) -> None:
    """So at most ``window`` blocks are open at a time, and none is opened twice in an epoch."""
    epoch = BlockOrder(num_samples, seed, block, window).between(0, num_samples) // block
    seen: set[int] = set()
    place = 0
    while place < num_samples:
        fresh: set[int] = set()
        rest = 0
        # A window ends where all samples of the blocks it opened are taken.
        while True:
            number = int(epoch[place])
            assert number not in seen, "a block of an earlier window is opened again"
            if number not in fresh:
                fresh.add(number)
                rest += min(block, num_samples - number * block)
            rest -= 1
            place += 1
            if rest == 0 and (len(fresh) == window or place == num_samples):
                break
            assert len(fresh) <= window
        seen |= fresh


@given(st.integers(1, 10**15), seeds, st.integers(1, 10**6), st.integers(1, 1000), st.integers(0, 10**17))
def test_any_position_of_any_size_is_a_sample(
    num_samples: int, seed: int, block: int, window: int, position: int
) -> None:
    order = BlockOrder(num_samples, seed, block, window)
    found = order.at(np.array([position, position + 1]))
    assert ((found >= 0) & (found < num_samples)).all()
    assert np.array_equal(order.at(np.array([position + 1, position]))[::-1], found)


@given(st.integers(2, 300), seeds, small, small)
def test_positions_in_any_order(num_samples: int, seed: int, block: int, window: int) -> None:
    order = BlockOrder(num_samples, seed, block, window)
    positions = np.random.default_rng(seed).integers(0, 4 * num_samples, size=50)
    assert order.at(positions).tolist() == [int(order.at(np.array([one]))[0]) for one in positions]


def test_epochs_seeds_and_windows_differ() -> None:
    size = 4096
    first, second = BlockOrder(size, 3, 64, 4).between(0, 2 * size).reshape(2, size)
    other = BlockOrder(size, 4, 64, 4).between(0, size)
    assert np.mean(first == second) < 0.01
    assert np.mean(first == other) < 0.01
    windows = first.reshape(-1, 256) % 64  # each window mixes in its own way
    assert np.mean(windows[0] == windows[1]) < 0.1


def test_the_block_order_never_changes() -> None:
    assert BlockOrder(10, 7, 4, 2).between(0, 20).tolist() == GOLDEN


def test_a_full_order_is_the_order_of_every_earlier_run() -> None:
    positions = np.arange(350)
    assert np.array_equal(FullOrder(100, 7).at(positions), sample_indices(positions, 100, 7))


def test_stored_order() -> None:
    assert SequentialOrder(3).between(1, 8).tolist() == [1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("make", [lambda: FullOrder(0, 1), lambda: SequentialOrder(0), lambda: BlockOrder(0, 1, 1, 1)])
def test_no_order_of_nothing(make: object) -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        make()  # type: ignore[operator]


def test_a_block_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockOrder(5, 1, 0, 1)


GOLDEN = [0, 1, 2, 8, 3, 9, 4, 7, 5, 6, 5, 6, 8, 9, 4, 7, 3, 0, 1, 2]

"""The order is final: these laws and pinned values are what a resumed or resized run rests on."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.core.seeds import derive_seed
from closeranks.data.sampling.order import BatchSchedule, MicroBatch, permute
from closeranks.data.sampling.permutation import sample_indices

keys = st.integers(0, 2**63 - 1)
sizes = st.integers(1, 5000)


def scalar_permute(index: int, size: int, key: int) -> int:
    """The same permutation in plain integers, written out apart."""
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value &= mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    bits = (size - 1).bit_length()
    low_bits = bits - bits // 2
    while True:
        high, low = index >> low_bits, index % 2**low_bits
        for number in range(8):
            round_key = mix(key + (number + 1) * 0x9E3779B97F4A7C15)
            if number % 2 == 0:
                high ^= mix(low ^ round_key) % 2 ** (bits // 2)
            else:
                low ^= mix(high ^ round_key) % 2**low_bits
        index = (high << low_bits) | low
        if index < size:
            return index


@given(sizes, keys)
@example(1, 0)
@example(2, 1)
@example(4096, 5)
@example(4097, 5)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))


@given(st.integers(1, 2**62), keys, st.data())
def test_vectorised_equals_scalar(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    image = permute(np.array(indices, dtype=np.uint64), size, key)
    assert [int(value) for value in image] == [scalar_permute(index, size, key) for index in indices]


def test_the_order_never_changes() -> None:
    assert permute(np.arange(10), 10, 0).tolist() == GOLDEN_TEN
    assert sample_indices(np.arange(95, 105), 100, 7).tolist() == GOLDEN_SEAM
    assert permute(np.array([0, 10**12]), 10**12 + 1, 3).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize(("index", "size"), [(5, 5), (-1, 5), (0, 0)])
def test_permute_refuses_an_index_outside(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="outside range"):
        permute(np.array([index]), size, 1)


def test_permute_keeps_shape_and_input() -> None:
    index = np.arange(12).reshape(3, 4)
    image = permute(index, 12, 9)
    assert image.shape == (3, 4)
    assert np.array_equal(index, np.arange(12).reshape(3, 4))
    assert permute(np.array([], dtype=np.int64), 12, 9).size == 0


def test_shuffle_leaves_no_rank_correlation() -> None:
    """For a random permutation the correlation has a standard deviation of 1/sqrt(n)."""
    for size in (100, 1797, 4096, 100_000):
        found = [abs(np.corrcoef(np.arange(size), permute(np.arange(size), size, key))[0, 1]) for key in range(20)]
        assert max(found) < 4.5 / np.sqrt(size)
        assert np.sqrt(np.mean(np.square(found))) < 2.0 / np.sqrt(size)


def test_neighbours_part_and_epochs_differ() -> None:
    size = 10_000
    image = permute(np.arange(size), size, 42).astype(np.int64)
    assert np.mean(np.abs(np.diff(image)) <= 5) < 0.005
    first, second = sample_indices(np.arange(2 * size), size, 0).reshape(2, size)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert np.mean(first == second) < 0.001


def test_every_first_sample_is_likely() -> None:
    firsts = np.bincount([int(permute(np.array([0]), 6, derive_seed(key))[0]) for key in range(3000)], minlength=6)
    assert firsts.min() > 350
    assert firsts.max() < 650


def test_a_million_is_well_under_a_second() -> None:
    began = time.process_time()
    permute(np.arange(1_000_000), 1_000_000, 1)
    assert time.process_time() - began < 0.7


@given(sizes.filter(lambda size: size <= 300), st.integers(0, 2**40), st.lists(st.integers(1, 50), max_size=20))
def test_each_epoch_has_every_sample_once_however_it_is_cut(num_samples: int, seed: int, cuts: list[int]) -> None:
    positions = np.arange(3 * num_samples)
    whole = sample_indices(positions, num_samples, seed)
    for epoch in whole.reshape(3, num_samples):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))
    parts = np.split(positions, np.cumsum(cuts))
    assert np.array_equal(np.concatenate([sample_indices(part, num_samples, seed) for part in parts]), whole)
    backwards = sample_indices(positions[::-1].copy(), num_samples, seed)
    assert np.array_equal(backwards[::-1], whole)


counts = st.integers(1, 70)


@given(counts, counts, counts, st.integers(1, 12), st.integers(0, 6), st.none() | st.integers(0, 300))
def test_ranks_share_out_exactly_the_micro_batches(
    num_samples: int, global_batch: int, micro_batch: int, data_size: int, num_steps: int, total: int | None
) -> None:
    schedule = BatchSchedule(num_samples, global_batch, micro_batch, num_steps, total)
    for step in range(num_steps + 2):
        whole = schedule.micro_batches(step)
        shares = [schedule.assigned(step, rank, data_size) for rank in range(data_size)]
        assert tuple(one for share in shares for one in share) == whole
        lengths = [len(share) for share in shares]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
        assert len(whole) == schedule.num_micro_batches(step)
        _check_step(schedule, step, whole)


@given(counts, counts, counts, st.integers(1, 8), st.integers(1, 4))
def test_spares_make_the_shares_even_and_count_nowhere(
    num_samples: int, global_batch: int, micro_batch: int, data_size: int, num_steps: int
) -> None:
    schedule = BatchSchedule(num_samples, global_batch, micro_batch, num_steps)
    for step in range(num_steps):
        shares = [schedule.assigned(step, rank, data_size, even=True) for rank in range(data_size)]
        assert len({len(share) for share in shares}) == 1
        assert tuple(one for share in shares for one in share if not one.is_padding) == schedule.micro_batches(step)
        for spare in (one for share in shares for one in share if one.is_padding):
            assert replace(spare, is_padding=False) == schedule.micro_batches(step)[-1]


def _check_step(schedule: BatchSchedule, step: int, whole: tuple[MicroBatch, ...]) -> None:
    positions = [position for one in whole for position in range(one.first, one.last)]
    assert positions == list(range(schedule.position(step), schedule.position(step + 1)))
    assert [(one.step, one.index) for one in whole] == [(step, index) for index in range(len(whole))]
    assert all(one.num_samples == schedule.micro_batch for one in whole[:-1])
    assert all(0 < one.num_samples <= schedule.micro_batch for one in whole)
    if schedule.total_samples is None:
        assert schedule.position(step) == step * schedule.global_batch


@given(counts, counts, counts, st.integers(1, 5))
def test_epochs_show_every_sample_that_often(
    num_samples: int, global_batch: int, micro_batch: int, epochs: int
) -> None:
    schedule = BatchSchedule.for_epochs(num_samples, global_batch, micro_batch, epochs)
    assert schedule.total_samples == epochs * num_samples
    assert schedule.num_steps == -(-schedule.total_samples // global_batch)
    steps = [schedule.micro_batches(step) for step in range(schedule.num_steps)]
    assert all(steps), "no step is empty"
    seen = np.concatenate([one.indices(num_samples, 3) for step in steps for one in step])
    assert np.array_equal(np.bincount(seen, minlength=num_samples), np.full(num_samples, epochs))
    assert schedule.position(schedule.num_steps) == schedule.total_samples
    assert schedule.micro_batches(schedule.num_steps) == ()


def test_the_last_step_of_an_epoch_is_short() -> None:
    schedule = BatchSchedule.for_epochs(num_samples=10, global_batch=4, micro_batch=2, epochs=1)
    assert schedule.num_steps == 3
    assert schedule.micro_batches(2) == (MicroBatch(2, 0, 8, 10),)
    assert schedule.assigned(2, 0, 2) == (MicroBatch(2, 0, 8, 10),)
    assert schedule.assigned(2, 1, 2) == ()


def test_half_an_epoch() -> None:
    schedule = BatchSchedule.for_epochs(num_samples=11, global_batch=4, micro_batch=4, epochs=0.5)
    assert (schedule.total_samples, schedule.num_steps) == (6, 2)


def test_steps_run_over_the_end_of_an_epoch() -> None:
    schedule = BatchSchedule.for_steps(num_samples=5, global_batch=4, micro_batch=4, steps=2)
    (second,) = schedule.micro_batches(1)
    assert (second.first, second.last) == (4, 8)
    expected = [*sample_indices(np.array([4]), 5, 1), *sample_indices(np.array([5, 6, 7]), 5, 1)]
    assert second.indices(5, 1).tolist() == expected


def test_the_micro_batch_does_not_depend_on_ranks() -> None:
    schedule = BatchSchedule.for_steps(100, 12, 3, 4)
    alone = {(m.step, m.index): m.indices(100, 5).tolist() for m in schedule.assigned(2, 0, 1)}
    four = {(m.step, m.index): m.indices(100, 5).tolist() for rank in range(4) for m in schedule.assigned(2, rank, 4)}
    assert alone == four


def test_bad_schedules() -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        BatchSchedule(0, 4, 2, 1)
    with pytest.raises(ValueError, match="at least one sample"):
        BatchSchedule(5, 0, 2, 1)
    with pytest.raises(ValueError, match="no data rank 2 of 2"):
        BatchSchedule(5, 4, 2, 1).assigned(0, 2, 2)


GOLDEN_TEN = [1, 0, 9, 3, 5, 6, 2, 8, 7, 4]
GOLDEN_SEAM = [88, 77, 38, 49, 32, 71, 7, 70, 39, 49]
GOLDEN_LARGE = [958896829846, 746982897834]

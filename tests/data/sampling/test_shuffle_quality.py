"""A full shuffle is as good as numpy's; blocks give up what their size says and no more.

Bounds of random permutations are 4.5 standard deviations, over several seeds: one false alarm in some ten thousand
runs if the seeds were new each time, and they are fixed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from closeranks.data.sampling.order import BlockOrder, FullOrder, Ints, SequentialOrder
from closeranks.data.sampling.shuffle_quality import ShuffleQuality, compare, measure, table

SIZE = 40_000
BATCH = 100
BLOCK = 100


def shuffled(seed: int) -> Ints:
    return np.random.default_rng(seed).permutation(SIZE).astype(np.int64)


def assert_random(quality: ShuffleQuality) -> None:
    """Standard deviations for n samples in m = n / batch batches, by theory or from ten thousand numpy permutations."""
    num_batches = SIZE / BATCH
    assert abs(quality.drift) < 4.5 / np.sqrt(SIZE)
    assert abs(quality.displacement - 1) < 4.5 * np.sqrt(
        0.4 / SIZE
    )  # |x - y| has mean 1/3 and variance 1/18, half of it free
    assert abs(quality.neighbours - 1) < 4.5 * np.sqrt(0.4 / SIZE)
    assert abs(quality.echo) < 4.5 / np.sqrt(SIZE)
    assert abs(quality.makeup - 1) < 4.5 * np.sqrt(2 / num_batches)
    assert abs(quality.evenness - 1) < 4.5 * np.sqrt(2 / 15**2)


@pytest.mark.parametrize("seed", range(8))
def test_numpy_passes_its_own_test(seed: int) -> None:
    assert_random(measure(shuffled(seed), batch=BATCH, block=BLOCK))


@pytest.mark.parametrize("seed", range(8))
def test_a_full_order_cannot_be_told_from_numpy(seed: int) -> None:
    """In its first epochs and a late one; and between two epochs as between two shuffles."""
    order = FullOrder(SIZE, seed)
    for epoch in (0, 1, 1000):
        assert_random(measure(order.between(epoch * SIZE, (epoch + 1) * SIZE), batch=BATCH, block=BLOCK))
    first, second = order.between(0, 2 * SIZE).reshape(2, SIZE)
    assert_random(measure(second[np.argsort(first)], batch=BATCH, block=BLOCK))


def test_full_orders_spread_like_numpy_over_many_seeds() -> None:
    """Single epochs could hide a small bias: the means over 60 seeds must agree within 4.5 standard errors."""
    ours = [measure(FullOrder(4000, seed).between(0, 4000), batch=50, block=50) for seed in range(60)]
    theirs = [measure(np.random.default_rng(seed).permutation(4000), batch=50, block=50) for seed in range(60)]
    for name in ("drift", "displacement", "neighbours", "echo", "makeup", "evenness", "places"):
        a, b = (np.array([getattr(one, name) for one in group]) for group in (ours, theirs))
        assert abs(a.mean() - b.mean()) < 4.5 * np.sqrt((a.var() + b.var()) / 60), name
        assert 0.5 < a.std() / b.std() < 2.0, name


def test_blocks_get_better_with_the_window() -> None:
    """As theory has it: the mean of a batch varies as that of its window's blocks does, besides its own draw."""
    num_blocks = SIZE // BLOCK
    found = {window: [_of_blocks(window, seed) for seed in range(6)] for window in (1, 4, 16, 64, num_blocks)}
    for window, several in found.items():
        apart = (num_blocks - window) / (num_blocks - 1)  # windows of all blocks do not differ
        makeup = float(np.mean([quality.makeup for quality in several]))
        assert makeup == pytest.approx(BATCH / window * apart + 1 - 1 / window, rel=0.3)
        assert np.mean([quality.echo for quality in several]) == pytest.approx(apart / window, abs=0.02)
        assert all(quality.places <= window for quality in several)
        # As random as that many blocks can be.
        assert all(abs(quality.drift) < 4.5 / np.sqrt(num_blocks) for quality in several)
    for quality in found[num_blocks]:
        assert_random(quality)  # one window over everything is a full shuffle


def _of_blocks(window: int, seed: int) -> ShuffleQuality:
    return measure(BlockOrder(SIZE, seed, BLOCK, window).between(0, SIZE), batch=BATCH, block=BLOCK)


def test_stored_order_is_no_shuffle() -> None:
    quality = measure(SequentialOrder(SIZE).between(0, SIZE), batch=BATCH, block=BLOCK)
    assert quality.drift == pytest.approx(1.0)
    assert quality.displacement == 0.0
    assert quality.echo > 0.99
    assert quality.makeup > 90
    assert quality.places == 1.0
    with pytest.raises(AssertionError):
        assert_random(quality)


@pytest.mark.parametrize("name", ["drift", "displacement", "neighbours", "echo", "makeup", "evenness"])
def test_each_measure_alone_tells_an_unshuffled_order(name: str) -> None:
    """None of them is decoration: with only that one taken from the stored order, the verdict changes."""
    random = measure(shuffled(0), batch=BATCH, block=BLOCK)
    stored = measure(SequentialOrder(SIZE).between(0, SIZE), batch=BATCH, block=BLOCK)
    with pytest.raises(AssertionError):
        assert_random(replace(random, **{name: getattr(stored, name)}))


def test_the_table_names_orders_and_measures() -> None:
    lines = table(compare(2048, batch=32, block=64, windows=(2,))).splitlines()
    assert lines[0].split()[:3] == ["order", "drift", "displacement"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["numpy", "full", "blocks, window 2", "none"]


def test_too_short_an_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        measure(np.arange(100), batch=80, block=10)

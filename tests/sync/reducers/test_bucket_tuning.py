"""Buckets as the links want them: read off times, chosen alike by all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import ConfigError
from closeranks.facts.communication.collective_cost import Link, NetworkModel, best_bucket_bytes, collective_cost
from closeranks.parallel.process_group import RankGroup
from closeranks.run.job.job import load_job
from closeranks.sync.config import SyncConfig
from closeranks.sync.reducers.bucket_tuning import (
    NUM_REPS,
    SIZES,
    AllReduceSample,
    BackwardWork,
    BucketTuning,
    backward_s,
    expected_s,
    fit_link,
    sample_sizes,
    tune_bucket_size,
)
from closeranks.testing import run_world

MIB = 1 << 20
MBIT = 1e6 / 8
ranks = st.integers(2, 64)


def ring_s(num_ranks: int, link: Link, num_bytes: int) -> float:
    return collective_cost("ring", num_bytes, NetworkModel.flat(num_ranks, link)).seconds


# --- reading a link off times


@given(ranks, st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(2, 4))
def test_a_ring_that_keeps_to_the_model_tells_its_link(p: int, latency_s: float, rate: float, num_sizes: int) -> None:
    link = Link(latency_s, rate)
    found = fit_link([AllReduceSample(size, ring_s(p, link, size)) for size in SIZES[:num_sizes]], p)
    times = [ring_s(p, found, size) for size in SIZES[:num_sizes]]
    assert times == pytest.approx([ring_s(p, link, size) for size in SIZES[:num_sizes]], rel=1e-4)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=4))
def test_whatever_was_measured_is_a_link(seconds: list[float]) -> None:
    found = fit_link([AllReduceSample(size, one) for size, one in zip(SIZES, seconds, strict=False)], 3)
    assert found.latency_s > 0
    assert found.bytes_per_s > 0
    assert best_bucket_bytes(50 * MIB, 0.1, NetworkModel.flat(3, found)) in range(256 << 10, (64 << 20) + 1)


def test_a_little_noise_moves_the_figures_a_little() -> None:
    link, factors = Link(2e-4, 3e8), (1.1, 0.93, 1.05, 0.97)
    noisy = [AllReduceSample(size, factor * ring_s(4, link, size)) for size, factor in zip(SIZES, factors, strict=True)]
    found = fit_link(noisy, 4)
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.15)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.15)


# --- how long measuring takes


@pytest.mark.parametrize(
    ("link", "num_ranks", "num_sizes", "most_s"),
    [
        (Link(20e-6, 10_000 * MBIT), 8, 4, 0.2),
        (Link(100e-6, 1_000 * MBIT), 8, 4, 0.8),
        (Link(200e-6, 100 * MBIT), 2, 3, 1.0),
        (Link(200e-6, 100 * MBIT), 8, 3, 1.0),
        (Link(200e-6, 100 * MBIT), 32, 2, 1.0),
        (Link(20e-3, 1_000 * MBIT), 2, 4, 2.0),  # far away: small messages say nothing of large ones
        (Link(200e-6, 10 * MBIT), 8, 2, 1.0),
    ],
)
def test_sizes_grow_as_far_as_the_link_is_fast(link: Link, num_ranks: int, num_sizes: int, most_s: float) -> None:
    asked: list[int] = []

    def seconds_of(num_bytes: int) -> float:
        asked.append(num_bytes)
        return ring_s(num_ranks, link, num_bytes)

    samples = sample_sizes(seconds_of)
    assert asked == list(SIZES[:num_sizes])
    assert NUM_REPS * sum(one.seconds for one in samples) < most_s


def test_what_is_expected_is_on_the_line_through_the_last_two() -> None:
    assert expected_s([], 1000) == expected_s([AllReduceSample(10, 3.0)], 1000) == 0.0
    assert expected_s(
        [AllReduceSample(1, 9.0), AllReduceSample(10, 3.0), AllReduceSample(20, 4.0)], 100
    ) == pytest.approx(12.0)
    assert expected_s([AllReduceSample(10, 3.0), AllReduceSample(20, 2.0)], 100) == 2.0, (
        "a larger one is not expected to be quicker"
    )


@pytest.mark.parametrize(("flops", "speed", "seconds"), [(3e9, 1e9, 2.0), (0.0, 1e9, 0.0), (3e9, 0.0, 0.0)])
def test_backward_is_two_thirds_of_a_micro_batch_or_not_known(flops: float, speed: float, seconds: float) -> None:
    assert backward_s(flops, speed) == pytest.approx(seconds)


# --- what a job can say


@pytest.mark.parametrize(
    ("said", "measured", "caps"),
    [
        ({}, 0.0, (25 * MIB, MIB)),
        ({"bucket_mib": 0.5}, 4.0, (MIB // 2, MIB)),
        ({"bucket_mib": "auto"}, 0.0, (25 * MIB, MIB)),
        ({"bucket_mib": "auto"}, 4.0, (4 * MIB, MIB)),
        ({"bucket_mib": "auto"}, 0.25, (MIB // 4, MIB // 4)),
    ],
)
def test_a_number_stands_and_auto_is_what_was_measured(
    said: dict[str, Any], measured: float, caps: tuple[int, int]
) -> None:
    assert SyncConfig(**said).bucket_caps(measured) == caps


@pytest.mark.parametrize("said", ["fast", "0", "-3"])
def test_any_other_word_or_size_is_refused_in_one_sentence(said: str) -> None:
    tables = {"model": {}, "data": {}, "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"sync\.bucket_mib.*number of MiB above 0, such as 25, or \"auto\""):
        load_job(None, [f"sync.bucket_mib={said}"], extra=tables)


# --- the real thing


def tuned(num_data: int) -> BucketTuning:
    """In data groups of so many ranks, of which each has other work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = RankGroup(rank, size)
    data = world
    for first in range(0, size, num_data) if num_data < size else ():
        group = dist.new_group(list(range(first, first + num_data)))
        data = RankGroup(rank - first, num_data, group) if first <= rank < first + num_data else data
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = tune_bucket_size(data, world, torch.device("cpu"), BackwardWork((rank + 1) * 20 * MIB, 0.05 * rank))
    assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.mark.world
@pytest.mark.parametrize(("size", "num_data"), [(3, 3), (4, 2)])
def test_all_ranks_choose_alike(size: int, num_data: int) -> None:
    found = run_world(tuned, size, num_data)
    assert all(one == found[0] for one in found)
    (link,) = {one.link for one in found}
    assert link is not None
    assert 1e-7 < link.latency_s < 1.0
    assert 1e5 < link.bytes_per_s < 1e12
    slowest = NetworkModel.flat(num_data, link)
    assert found[0].bucket_mib * MIB == best_bucket_bytes(size * 20 * MIB, 0.05 * (size - 1), slowest)


def test_the_sizes_that_are_timed_grow() -> None:
    assert all(2 * small <= large for small, large in pairwise(SIZES))

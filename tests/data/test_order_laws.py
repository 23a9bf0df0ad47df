"""What a run sees, whoever reads it: every kind of order under workers, micro-batches, resumes, resizes and skips.

A run is played without processes: each life of it has a number of data ranks and ends after some steps; ranks take
their micro-batches from the schedule, and what they read is put back into the order of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.sampling.mixture_order import MixtureOrder
from closeranks.data.sampling.order import BatchSchedule, BlockOrder, FullOrder, SampleOrder, SequentialOrder


@dataclass(frozen=True)
class Life:
    """From a start or resume to the next."""

    data_size: int
    num_steps: int
    lost: int
    """Steps at its end that were computed after the last checkpoint, and are computed again by the next life."""
    even: bool


@st.composite
def singles(draw: st.DrawFn) -> SampleOrder:
    size, seed = draw(st.integers(1, 60)), draw(st.integers(0, 2**40))
    kind = draw(st.sampled_from(["full", "blocks", "none"]))
    if kind == "blocks":
        return BlockOrder(size, seed, draw(st.integers(1, 20)), draw(st.integers(1, 6)))
    return FullOrder(size, seed) if kind == "full" else SequentialOrder(size)


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    parts = draw(st.lists(singles(), min_size=1, max_size=5))
    weights = draw(st.lists(st.sampled_from([0.1, 0.35, 1.0, 2.5, 7.0]), min_size=len(parts), max_size=len(parts)))
    return MixtureOrder(tuple(parts), tuple(weights))


lives = st.lists(
    st.builds(Life, st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=5
)
batches = st.tuples(st.integers(1, 24), st.integers(1, 9))


def play(
    order: SampleOrder, batch: tuple[int, int], several: list[Life], skipped: frozenset[int]
) -> dict[int, tuple[int, bool]]:
    """Position to (sample, whether it counted), as the run leaves it behind. A position counted twice fails."""
    kept: dict[int, tuple[int, bool]] = {}
    step = 0
    for life in several:
        schedule = BatchSchedule.for_steps(order.num_samples, *batch, step + life.num_steps)
        steps = range(step, step + life.num_steps)
        seen = [_one_step(order, schedule, now, life, skipped) for now in steps]
        kept_steps = seen[: max(len(seen) - life.lost, 0)]
        for places in kept_steps:
            assert not kept.keys() & places.keys()
            kept |= places
        step += len(kept_steps)
    return kept


def _one_step(
    order: SampleOrder, schedule: BatchSchedule, step: int, life: Life, skipped: frozenset[int]
) -> dict[int, tuple[int, bool]]:
    places: dict[int, tuple[int, bool]] = {}
    counts = set()
    for rank in range(life.data_size):
        mine = schedule.assigned(step, rank, life.data_size, even=life.even)
        counts.add(len(mine))
        for one in mine:
            for place, sample in zip(range(one.first, one.last), order.between(one.first, one.last), strict=True):
                if not one.is_padding:
                    assert place not in places
                    places[place] = (int(sample), int(sample) not in skipped)
    assert not life.even or len(counts) == 1, "a rank with fewer micro-batches would leave the others waiting"
    return places


@given(singles() | mixtures(), batches, lives, st.frozensets(st.integers(0, 80), max_size=10))
def test_the_order_is_one_whatever_happens_to_the_run(
    order: SampleOrder, batch: tuple[int, int], several: list[Life], skipped: frozenset[int]
) -> None:
    places = play(order, batch, several, skipped)
    assert sorted(places) == list(range(len(places))), "no position is left out"
    expected = order.between(0, len(places))
    assert [places[place][0] for place in range(len(places))] == expected.tolist()
    assert [places[place][1] for place in range(len(places))] == [sample not in skipped for sample in expected.tolist()]


@given(singles(), batches, lives, st.frozensets(st.integers(0, 80), max_size=10))
def test_every_sample_counts_once_an_epoch(
    order: SampleOrder, batch: tuple[int, int], several: list[Life], skipped: frozenset[int]
) -> None:
    places = play(order, batch, several, skipped)
    size = order.num_samples
    for epoch in range(len(places) // size):
        counted = [
            sample for sample, counts in map(places.__getitem__, range(epoch * size, (epoch + 1) * size)) if counts
        ]
        assert sorted(counted) == [sample for sample in range(size) if sample not in skipped]


@given(mixtures(), batches, lives)
def test_proportions_hold_whatever_happens_to_the_run(
    order: MixtureOrder, batch: tuple[int, int], several: list[Life]
) -> None:
    places = play(order, batch, several, frozenset())
    bounds = np.cumsum([0, *(part.num_samples for part in order.parts)])
    owners = [int(np.searchsorted(bounds, places[place][0], side="right")) - 1 for place in range(len(places))]
    for number, weight in enumerate(order.weights):
        share = weight / sum(order.weights)
        draws = np.cumsum([owner == number for owner in owners])
        assert (np.abs(draws - share * np.arange(1, len(owners) + 1)) < 1.0 + 1e-9).all()


@given(mixtures(), st.integers(1, 400))
def test_each_part_of_a_mixture_has_every_sample_once_an_epoch_of_its_own(order: MixtureOrder, length: int) -> None:
    samples = order.between(0, length)
    bounds = np.cumsum([0, *(part.num_samples for part in order.parts)])
    for first, last in pairwise(bounds):
        own = samples[(samples >= first) & (samples < last)] - first
        size = int(last - first)
        for begin in range(0, len(own), size):
            epoch = own[begin : begin + size]
            assert len(np.unique(epoch)) == len(epoch)


@given(singles() | mixtures(), st.lists(st.integers(0, 10**13), min_size=1, max_size=12))
def test_any_position_is_found_without_those_before_it(order: SampleOrder, positions: list[int]) -> None:
    together = order.at(np.array(positions))
    assert together.tolist() == [int(order.at(np.array([one]))[0]) for one in positions]
    assert ((together >= 0) & (together < order.num_samples)).all()

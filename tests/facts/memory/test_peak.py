"""The peak of a step is one moment of it: more than any other, and never everything at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.memory.peak import ActivationBytes, PeakBytes, ReducerBytes, WeightBytes, peak_bytes

WEIGHTS = WeightBytes(whole=1000, head=100, embedding=100, is_tied=False, block=100, matrix=40)
ALONE = ReducerBytes(0, True, 0.0)
KEPT = 600.0
ACTIVATIONS = ActivationBytes(
    blocks=400, ends=200, head=150, logits=300, logits_gradient=100, again=0, block_gradients=20
)


def peak(reducer: ReducerBytes = ALONE, num_micro: int = 1, in_flight: float = 1, **changes: float) -> PeakBytes:
    return peak_bytes(WEIGHTS, reducer, replace(ACTIVATIONS, **changes), num_micro, in_flight)


def test_gradients_of_one_micro_batch_appear_as_activations_are_freed() -> None:
    found = peak()
    assert found.moment != "loss"
    assert found.total == 1000, "all gradients, and no activation of another block"
    many = peak(blocks=4000)
    assert (many.moment, many.gradients, many.total) == ("loss", 0, 4000 + 200 + 300)


def test_gradients_of_earlier_micro_batches_are_there_at_the_loss() -> None:
    found = peak(num_micro=2)
    assert (found.moment, found.gradients, found.total) == ("loss", 1000, 1000 + KEPT + 300)


def test_buckets_that_are_never_freed_hold_gradients_from_the_start() -> None:
    buckets = ReducerBytes(0, True, 1000.0)
    assert peak(buckets).total == 1000 + KEPT + 300
    assert peak(buckets, num_micro=2).gradients == 2000


def test_a_schedule_that_holds_all_micro_batches_has_no_gradients_until_one_is_freed() -> None:
    all_held = peak(num_micro=4, in_flight=4, blocks=2000)
    assert (all_held.moment, all_held.gradients) == ("loss", 1000)
    assert all_held.total == pytest.approx(1000 + 0.75 * 2200 + 300, abs=1)
    assert peak(num_micro=4, in_flight=4, blocks=8000).gradients == 0


def test_zero_2_holds_slices_and_what_travels() -> None:
    scattered = ReducerBytes(
        2, False, 100.0, num_shards=10, first_bucket=100, last_buckets=(100.0, 30.0), block_bucket=30
    )
    assert peak(scattered).total == 100 + KEPT + 300, "nothing travels before the first backward"
    assert peak(scattered, num_micro=2).total == 100 + KEPT + 300 + 130
    assert peak(scattered, num_micro=3).total == 100 + KEPT + 300 + 130 + 13
    assert peak(replace(scattered, holds_step=True), num_micro=2).total == 100 + 1000 + KEPT + 300


def test_zero_3_holds_what_is_gathered() -> None:
    gathered = ReducerBytes(3, False, 0.0, num_shards=10, rest=200, last_unit=100, ahead=150)
    assert peak(gathered, blocks=4000).total == 4000 + 200 + 300 + 300, "no gradients yet"
    found = peak(gathered, num_micro=2, blocks=4000)
    assert found.total == 100 + 4000 + 200 + 300 + 300 + 200, "shards, and the last gradients on their way"
    empty = peak_bytes(WEIGHTS, gathered, ActivationBytes(), 2, 1)
    assert empty.moment != "loss", "a stage in the middle has none"
    step = peak(replace(gathered, holds_step=True), num_micro=2)
    assert step.total == 1000 + 1000 + KEPT + 300


def test_the_parts_add_up() -> None:
    found = peak(num_micro=2, again=700)
    parts = {part.name: part.num_bytes for part in (*found.buffers, *found.activations)}
    assert found.moment == "last block"
    assert found.total == found.gradients + sum(parts.values())
    assert parts["one block computed again"] == 700
    assert "logits and their gradient" not in parts

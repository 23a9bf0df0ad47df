"""When replicas meet, what meets, and how fragments are cut: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.sync.local_sgd.sync_schedule import SyncSchedule, assign_fragments


@st.composite
def runs(draw: st.DrawFn) -> SyncSchedule:
    num_fragments = draw(st.integers(1, 5))
    return SyncSchedule(num_fragments * draw(st.integers(1, 7)), num_fragments, draw(st.integers(1, 120)))


@given(runs())
def test_every_fragment_meets_every_so_many_steps_and_all_at_the_end(rounds: SyncSchedule) -> None:
    steps = range(1, rounds.num_steps + 1)
    for fragment in range(rounds.num_fragments):
        met = [step for step in steps if fragment in rounds.fragments(step)]
        assert met[-1] == rounds.num_steps
        first = rounds.sync_interval * (fragment + 1)
        assert [step for step in met if step % rounds.sync_interval == 0 and step < rounds.num_steps] == list(
            range(first, rounds.num_steps, rounds.every)
        )
    assert rounds.fragments(rounds.num_steps) == tuple(range(rounds.num_fragments))
    assert all(bool(rounds.fragments(step)) == rounds.is_sync_step(step) for step in steps)
    assert all(len(rounds.fragments(step)) <= 1 for step in steps[:-1])


@given(runs(), st.integers(1, 40))
def test_what_is_due_now_and_then_is_due_once_at_the_meeting_that_follows(rounds: SyncSchedule, every: int) -> None:
    steps = range(1, rounds.num_steps + 1)
    meetings = [step for step in steps if rounds.is_sync_step(step)]
    expected = {next(meeting for meeting in meetings if meeting >= due) for due in steps if due % every == 0}
    assert {step for step in steps if rounds.is_due(step, every)} == expected
    for before, after in zip([0, *meetings], meetings, strict=False):
        assert rounds.previous_sync(after) == before
        assert all(rounds.next_sync(step) == after for step in range(before, after))
    assert [rounds.num_syncs(meeting) for meeting in meetings] == list(range(1, len(meetings) + 1))


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 9))
def test_where_nobody_trains_apart_every_step_is_as_ever(step: int, num_steps: int, every: int) -> None:
    rounds = SyncSchedule(num_steps=num_steps)
    assert rounds.is_sync_step(step)
    assert rounds.fragments(step) == ()
    if step:
        assert rounds.is_due(step, every) == (step % every == 0)
        assert rounds.previous_sync(step) == step - 1
    assert not rounds.is_due(step, 0)


def test_blocks_are_dealt_out_in_turn() -> None:
    blocks = [f"layers.{number}" for number in range(12)]
    sizes = {"embed.weight": 7, **{f"{block}.weight": 5 for block in blocks}, "norm.weight": 1, "head.weight": 7}
    found = assign_fragments(sizes, blocks, 3)
    assert [found[f"{block}.weight"] for block in blocks] == [0, 1, 2] * 4
    assert found["embed.weight"] == 0
    assert found["norm.weight"] == found["head.weight"] == found["layers.11.weight"]
    assert found["layers.1.weight"] != found["layers.10.weight"] or 1 % 3 == 10 % 3  # a name is no prefix of another


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.integers(1, 30))
def test_without_blocks_the_model_is_cut_in_its_own_order(numels: list[int], num_fragments: int) -> None:
    sizes = {f"p{number}": numel for number, numel in enumerate(numels)}
    found = list(assign_fragments(sizes, (), num_fragments).values())
    assert found == sorted(found)
    if num_fragments <= len(sizes):
        assert set(found) == set(range(num_fragments))


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_without_blocks_are_about_equal(num_fragments: int) -> None:
    found = assign_fragments({f"p{number}": 10 for number in range(12)}, (), num_fragments)
    counts = [list(found.values()).count(number) for number in range(num_fragments)]
    assert counts == [12 // num_fragments] * num_fragments

"""The nearest legal layout: legal, of the right size, and itself where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.facts.layout import SCHEDULES, Layout, LayoutConstraints, legal_problems
from closeranks.facts.nearest_layout import nearest_layout_hint, nearest_legal
from tests.facts.test_layout import DEMANDS, DIGITS

layouts = st.builds(
    Layout,
    data=st.integers(0, 9),
    zero=st.integers(0, 4),
    shard=st.integers(0, 5),
    tensor=st.integers(1, 9),
    pipeline=st.integers(1, 9),
    schedule=st.sampled_from([*SCHEDULES, "unheard-of"]),
)


@given(layouts, st.integers(1, 16), st.sampled_from([DEMANDS, DIGITS, replace(DEMANDS, global_batch=3)]))
def test_what_is_found_is_legal_and_of_that_size(layout: Layout, num_ranks: int, demands: LayoutConstraints) -> None:
    near = nearest_legal(layout, demands, num_ranks)
    if near is None:
        plain = [Layout(num_ranks // (t * p), tensor=t, pipeline=p) for t in range(1, 17) for p in range(1, 17)]
        fitting = [other for other in plain if other.num_ranks == num_ranks]
        assert all(legal_problems(other, demands) for other in fitting)
    else:
        assert near.num_ranks == num_ranks
        assert legal_problems(near, demands) == ()
        assert near == nearest_legal(layout, demands, num_ranks)


@given(layouts)
@example(Layout(shard=1, schedule="gpipe"))
def test_a_legal_layout_is_its_own_nearest(layout: Layout) -> None:
    if not legal_problems(layout, DEMANDS):
        assert nearest_legal(layout, DEMANDS, layout.num_ranks) == layout


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        ("data=2 tensor=3", 8, "data=2 tensor=4"),
        ("data=1 tensor=16", 16, "data=2 tensor=8"),
        ("data=9", 9, "data=3 pipeline=3"),
        ("data=11", 11, None),
        ("data=16", 16, "data=8 tensor=2"),
        ("data=8 zero=3 shard=3", 8, "data=8 zero=3 shard=4"),
        ("data=4 shard=2 tensor=2", 8, "data=4 tensor=2"),
        ("data=2 zero=7 tensor=2", 4, "data=2 zero=3 tensor=2"),
        ("pipeline=8 schedule=zbv", 8, "pipeline=8"),
        ("pipeline=2 schedule=1f1", 2, "pipeline=2"),
        ("tensor=2 pipeline=2", 8, "data=2 tensor=2 pipeline=2"),
        ("context=2 tensor=2", 4, "data=2 tensor=2"),
    ],
)
def test_tensor_and_pipeline_are_kept_where_they_can_be(text: str, num_ranks: int, expected: str | None) -> None:
    near = nearest_legal(Layout.parse(text), DEMANDS, num_ranks)
    assert (str(near) if near else None) == expected


def test_the_advice_is_a_sentence() -> None:
    assert nearest_layout_hint(Layout(2, tensor=3), DEMANDS, 8) == "The nearest legal layout is data=2 tensor=4."
    assert "No layout of 9 ranks is legal" in nearest_layout_hint(Layout(9), DIGITS, 9)
    impossible = replace(DIGITS, global_batch=0)
    assert "No layout of 1 rank is legal" in nearest_layout_hint(Layout(), impossible, 1)


def test_a_schedule_that_was_exchanged_is_named() -> None:
    zbv, plain = Layout(pipeline=8, schedule="zbv"), Layout(pipeline=9)
    assert nearest_layout_hint(zbv, DEMANDS, 8) == "The nearest legal layout is pipeline=8 schedule=1f1b."
    assert (
        nearest_layout_hint(replace(zbv, schedule="1f1"), DEMANDS, 8)
        == "The nearest legal layout is pipeline=8 schedule=1f1b."
    )
    assert "schedule" not in nearest_layout_hint(plain, DEMANDS, 9)


def test_nothing_is_near_to_no_ranks_at_all() -> None:
    assert nearest_layout_hint(Layout(tensor=0), DEMANDS, 0) == ""

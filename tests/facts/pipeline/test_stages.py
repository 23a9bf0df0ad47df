from itertools import combinations, pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import ModelError, UserError
from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.stages import balance_stages, stage_placement

costs = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 20]), min_size=1, max_size=9)


def score(values: list[int], cuts: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    sums = [sum(values[first:last]) for first, last in cuts]
    return max(sums), sum(s * s for s in sums), sum((last - first) ** 2 for first, last in cuts)


@given(costs, st.data())
def test_no_other_cut_is_better(values: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(values)))
    cuts = balance_stages(values, num_stages)
    assert [unit for first, last in cuts for unit in range(first, last)] == list(range(len(values)))
    assert len(cuts) == num_stages
    assert all(first < last for first, last in cuts)
    others = combinations(range(1, len(values)), num_stages - 1)
    assert score(values, cuts) == min(score(values, tuple(pairwise([0, *cut, len(values)]))) for cut in others)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_any_costs_give_whole_stages(values: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(values)))
    cuts = balance_stages(values, num_stages)
    assert (cuts[0][0], cuts[-1][1], len(cuts)) == (0, len(values), num_stages)
    assert all(first < last for first, last in cuts)
    assert all(left[1] == right[0] for left, right in pairwise(cuts))


def test_what_does_not_divide_makes_the_first_stages_light() -> None:
    assert balance_stages([1] * 10, 4) == ((0, 2), (2, 4), (4, 7), (7, 10))


def test_units_that_cost_nothing_are_spread_too() -> None:
    assert balance_stages([0] * 6, 3) == ((0, 2), (2, 4), (4, 6))


def test_a_heavy_end_gets_fewer_units() -> None:
    assert balance_stages([1, 1, 1, 1, 1, 1, 4], 2) == ((0, 5), (5, 7))


@pytest.mark.parametrize("heavy", [1.0, 1e6])
def test_many_units_are_cut_fast(heavy: float) -> None:
    started_at = process_time()
    cuts = balance_stages([heavy, *[1.0] * 999], 64)
    assert len(cuts) == 64
    assert process_time() - started_at < 10


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ModelError, match="3 units do not make 4 stages"):
        balance_stages([1, 1, 1], 4)
    with pytest.raises(ModelError, match="do not make 0 stages"):
        balance_stages([1], 0)
    with pytest.raises(ModelError, match="unit 1 costs -1"):
        balance_stages([1, -1], 1)
    with pytest.raises(ModelError, match="unit 0 costs nan"):
        balance_stages([float("nan")], 1)


def test_where_stages_stand() -> None:
    assert stage_placement("1f1b", 3) == ((0,), (1,), (2,))
    assert stage_placement("interleaved-1f1b", 3) == ((0, 3), (1, 4), (2, 5))
    assert stage_placement("zbv", 3) == ((0, 5), (1, 4), (2, 3))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16))
def test_every_stage_stands_on_one_rank(name: str, num_ranks: int) -> None:
    places = stage_placement(name, num_ranks)
    assert sorted(stage for stages in places for stage in stages) == list(range(num_ranks * SCHEDULES[name]))
    assert all(len(stages) == SCHEDULES[name] for stages in places)


def test_an_unknown_schedule_has_no_places() -> None:
    with pytest.raises(UserError, match="no schedule"):
        stage_placement("2f2b", 2)

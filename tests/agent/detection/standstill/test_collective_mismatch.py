"""Where ranks stopped issuing the same collectives, and which of them is wrong."""

from __future__ import annotations

import pytest

from closeranks.agent.detection.standstill.collective_mismatch import find_mismatch
from tests.agent.detection.standstill.scenes import DONE, WAITING, call

STEP = (("all_reduce", (1,), "train.py:10 in loss"), ("all_reduce", (80,), "train.py:40 in <module>"))


def steps(num: int) -> list[tuple[str, tuple[int, ...], str]]:
    return [STEP[index % 2] for index in range(num)]


def issued(kinds: list[tuple[str, tuple[int, ...], str]]) -> list[object]:
    last = len(kinds)
    return [
        call(n, op, shape, place=place, state=WAITING if n == last else DONE)
        for n, (op, shape, place) in enumerate(kinds, 1)
    ]


def test_ranks_that_agree_have_none() -> None:
    rows = issued(steps(6))
    assert find_mismatch({0: rows, 1: rows, 2: issued(steps(5))}) is None


def test_of_two_ranks_the_one_that_departs_from_what_it_did_took_another_branch() -> None:
    """It leaves out the user's own all_reduce, and goes on to the gradients'."""
    found = find_mismatch({0: issued(steps(7)), 1: issued([*steps(6), STEP[1]])})
    assert found is not None
    assert (found.kind, found.odd, found.sequence) == ("branch", (1,), 7)
    assert [one.place for _, one in found.ranks_by_collective] == [STEP[0][2], STEP[1][2]], "the odd one last"


def test_of_two_ranks_without_a_past_nobody_is_blamed() -> None:
    found = find_mismatch({0: issued([STEP[0]]), 1: issued([STEP[1]])})
    assert found is not None
    assert found.odd == ()


def test_the_minority_is_wrong_even_without_a_past() -> None:
    rows = {rank: issued([STEP[0]]) for rank in range(4)}
    rows[2] = issued([STEP[1]])
    found = find_mismatch(rows)
    assert found is not None
    assert found.odd == (2,)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (("all_reduce", (9,), "train.py:10 in loss"), "shape"),
        (("all_gather", (1,), "train.py:10 in loss"), "branch"),
    ],
)
def test_what_differs_is_told(one: tuple[str, tuple[int, ...], str], kind: str) -> None:
    found = find_mismatch({0: issued(steps(7)), 1: issued([*steps(6), one])})
    assert found is not None
    assert (found.kind, found.odd) == (kind, (1,))


def test_another_order_shows_where_both_were_issued() -> None:
    swapped = [*steps(6), STEP[1], STEP[0]]
    found = find_mismatch({0: issued(steps(8)), 1: issued(swapped)})
    assert found is not None
    assert (found.kind, found.odd, found.sequence) == ("order", (1,), 7)


def test_another_order_shows_by_what_used_to_follow() -> None:
    """Nobody has issued the second of the two: what comes next is called first, from a line where it never was."""
    found = find_mismatch({0: issued(steps(7)), 1: issued([*steps(6), ("all_reduce", (80,), "train.py:12 in loss")])})
    assert found is not None
    assert (found.kind, found.odd) == ("order", (1,))
    tensors = [("all_reduce", (size,), "train.py:20 in sync") for size in (2, 3)]
    in_order, reversed_once = tensors * 3 + tensors[:1], tensors * 3 + tensors[1:]
    found = find_mismatch({0: issued(in_order), 1: issued(reversed_once)})
    assert found is not None
    assert (found.kind, found.odd) == ("order", (1,)), "in one loop over tensors"


def test_ranks_may_send_different_parts_of_an_all_to_all() -> None:
    assert find_mismatch({0: [call(1, "all_to_all", (3,))], 1: [call(1, "all_to_all", (5,))]}) is None


def test_a_gather_that_everybody_has_completed_did_no_harm_but_a_sum_did() -> None:
    assert find_mismatch({0: [call(1, "all_gather", (3,))], 1: [call(1, "all_gather", (5,))]}) is None
    assert find_mismatch({0: [call(1, shape=(3,))], 1: [call(1, shape=(5,))]}) is not None


def test_groups_are_counted_apart() -> None:
    rows = {0: [call(1, group="a"), call(1, "all_gather", group="b")], 1: [call(1, "all_gather", group="b")]}
    assert find_mismatch(rows) is None

"""Laws of random campaigns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.elastic.faults.campaign import draw_campaign
from closeranks.elastic.faults.fault import KINDS, check_faults

_KINDS = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True)
_ENDING = st.lists(st.sampled_from(["kill", "hang", "stop", "oom", "bitflip", "zygote"]), min_size=1, unique=True)
_SEEDS = st.integers(0, 2**32)


@given(_KINDS, st.integers(1, 60), _SEEDS, st.integers(0, 300), st.integers(2, 16))
def test_a_campaign_is_a_value_that_its_run_can_meet(
    kinds: list[str], count: int, seed: int, more: int, num_ranks: int
) -> None:
    num_steps = max(3, count) + more
    faults = draw_campaign(kinds, count, seed, num_steps, num_ranks)
    assert faults == draw_campaign(kinds, count, seed, num_steps, num_ranks)
    assert len(faults) == count
    check_faults(faults, num_ranks, num_steps)
    times = Counter(fault.kind for fault in faults)
    assert max(times.values()) - min(times[kind] for kind in kinds) <= 1
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)


@given(_ENDING, st.integers(3, 60), _SEEDS, st.integers(0, 300))
def test_steps_are_spread_over_the_run(kinds: list[str], count: int, seed: int, more: int) -> None:
    num_steps = count + more
    steps = [fault.step for fault in draw_campaign(kinds, count, seed, num_steps, 4)]
    assert {1, (num_steps + 1) // 2, num_steps} <= set(steps)
    assert len(set(steps)) == count
    widest = max(b - a for a, b in pairwise(steps))
    assert widest <= 2 * (num_steps - 1) / (count - 1) + 1


def test_the_seed_decides() -> None:
    drawn = {tuple(map(str, draw_campaign(["kill", "hang", "slow"], 6, seed, 40, 4))) for seed in range(20)}
    assert len(drawn) > 15


def test_every_rank_comes_up() -> None:
    assert {fault.rank for fault in draw_campaign(["kill"], 60, 7, 100, 4)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], 3, 0, 10, 2), "at least one kind"),
        ((["kill"], 0, 0, 10, 2), "at least one kind"),
        ((["kill"], 11, 0, 10, 2), "11 faults do not fit into 10 steps"),
        ((["kill2"], 3, 0, 10, 1), "at least 2 workers"),
        ((["torn"], 1, 0, 2, 1), "at least 3 steps"),
        ((["diskfull"], 1, 0, 1, 1), "at least 2 steps"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[list[str], int, int, int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        draw_campaign(*arguments)

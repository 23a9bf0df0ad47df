from __future__ import annotations

from typing import Any

import pytest
from membership import figures_of, judge, judge_growth
from membership_fleet import Fleet

from closeranks.agent.membership.lease_timing import lease_timing_for
from tests.benchmarks.scripts import run_script


def test_five_hundred_agents_need_as_many_rounds_as_twenty() -> None:
    closing = run_script("membership.py", "--hosts", "500")
    assert closing["name"] == "membership"
    small, large = closing["figures"]["small"], closing["figures"]["large"]
    assert (small["hosts"], large["hosts"]) == (20, 500)
    assert judge_growth(small, large)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return figures_of(40)


def test_rounds_are_counted_by_hand(small: dict[str, Any]) -> None:
    """Join, welcome, beat, begin, beat. And closed, then a wait in which fence and fenced travel, then begin, beat."""
    assert small["form"]["rounds"] == 5
    assert small["form"]["messages"] == 3 * 40
    assert small["one_lost"]["rounds"] == 3
    assert small["many_lost"]["rounds"] == 3


def test_a_split_costs_a_lease(small: dict[str, Any]) -> None:
    pace = lease_timing_for(40)
    assert pace.dead_after_s - 2 * pace.beat_s <= small["split"]["seconds"] <= pace.dead_after_s + 2 * pace.beat_s


def test_the_goal_can_be_missed(small: dict[str, Any]) -> None:
    figures = {"small": small, "large": small, "wire": {"us": 50.0}}
    assert judge(figures)
    assert not judge({**figures, "large": {**small, "form": {**small["form"], "rounds": 6}}})
    assert not judge({**figures, "large": {**small, "healed": {**small["healed"], "per_host": 4.5}}})
    assert not judge({**figures, "large": {**small, "messages_per_s": 4001.0}})
    assert not judge({**figures, "wire": {"us": 1e6}})


def test_a_fleet_that_does_not_get_there_is_noticed() -> None:
    fleet = Fleet(3)
    with pytest.raises(AssertionError, match="has not got there"):
        fleet.until(lambda: fleet.is_running(4), longest_s=2.0)

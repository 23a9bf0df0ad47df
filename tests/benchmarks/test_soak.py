from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak import is_sound, judge
from soak_figures import Cost, Course, Done, Struck, by_kind, calm_rates, costs, growth, parts_of, throughput
from soak_lane import Orders, read_orders, write_orders
from soak_page import write_page
from soak_picture import draw
from soak_plan import LIGHT, PER_MINUTE, Plan, Window, draw_plan
from soak_watch import Sample

from closeranks.core.events import RankLost, RanksClosed, SaveFailed, SlowRank
from closeranks.elastic.faults.fault import KINDS
from closeranks.telemetry.run_log.fault_history import TimedEvent
from tests.benchmarks.scripts import run_script

BEGAN_AT = 1000.0
CALM_STORM = Plan(
    (Window(0, 10, False), Window(10, 20, True), Window(20, 30, False), Window(30, 40, True), Window(40, 50, False)), ()
)


def steps(step_s: float, last_s: float, *, standstill: tuple[float, float] = (0.0, 0.0)) -> list[Done]:
    """One step every ``step_s``, none while it stands still."""
    found, now_s, step = [], 0.0, 0
    while now_s <= last_s:
        found.append(Done(now_s, step))
        step, now_s = step + 1, now_s + step_s
        if found[-1].at_s < standstill[0] <= now_s:
            now_s += standstill[1]
    return found


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12, unique=True),
    st.floats(0.5, 30),
    st.integers(0, 80),
    st.integers(0, 5),
)
def test_a_plan_spreads_its_faults_over_the_storms(kinds: list[str], minutes: float, count: int, seed: int) -> None:
    plan = draw_plan(kinds, minutes, count, seed, 4)
    assert plan == draw_plan(kinds, minutes, count, seed, 4)
    assert sum(storm.seconds for storm in plan.storms) == pytest.approx(60 * minutes)
    assert len(plan.faults) == (count or -(-minutes * PER_MINUTE // 1))
    for fault in plan.faults:
        assert any(storm.begins_s <= fault.at_s <= storm.ends_s for storm in plan.storms)
        assert fault.rank != fault.other
        assert {fault.rank, fault.other} <= set(range(4))
    turns = [sum(fault.kind == kind for fault in plan.faults) for kind in kinds]
    assert max(turns) - min(turns) <= 1


def test_half_an_hour_has_sixty_faults_at_other_seconds_for_another_seed() -> None:
    plan = draw_plan(LIGHT, 30, 0, 7, 4)
    assert len(plan.faults) >= 60
    assert plan.ends_s <= 35 * 60
    assert [one.at_s for one in plan.faults] != [one.at_s for one in draw_plan(LIGHT, 30, 0, 8, 4).faults]


def test_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    orders = Orders("job.toml", ("a=1",), 4, "run", "strikes", draw_plan(LIGHT, 1, 3, 0, 4))
    write_orders(orders, tmp_path / "orders.json")
    assert read_orders(tmp_path / "orders.json") == orders


def test_undisturbed_steps_are_all_of_them() -> None:
    made = throughput(Course(steps(0.5, 50)), CALM_STORM)
    assert made["ratio"] == pytest.approx(1.0, abs=0.001)
    assert made["ratio_to_steps_between"] == pytest.approx(1.0, abs=0.001)
    assert (made["step_s"], made["calm_spread"]) == (0.5, 0.0)


def test_a_standstill_of_one_in_twenty_seconds_of_storm_costs_a_twentieth() -> None:
    made = throughput(Course(steps(0.5, 60, standstill=(14.0, 1.0))), CALM_STORM)
    assert made["ratio"] == pytest.approx(0.95, abs=0.001)
    assert made["ratio_by_storm"] == [pytest.approx(0.9, abs=0.001), pytest.approx(1.0, abs=0.001)]


def test_a_step_that_is_done_again_counts_once() -> None:
    lines = [Done(0, 0), Done(1, 1), Done(2, 2), Done(3, 1), Done(4, 2), Done(5, 3)]
    course = Course(lines)
    assert [line.step for line in course.new] == [0, 1, 2, 3]
    assert course.at(3.5) == 2.5
    assert course.at(99) == 3


def test_each_storm_is_held_against_the_calms_beside_it() -> None:
    """The machine gets slower half-way: the first storm is not blamed for it."""
    slower = [Done(30 + 1.0 * number, 60 + number) for number in range(1, 25)]
    course = Course([*steps(0.5, 30), *slower])
    assert calm_rates(course, CALM_STORM.windows) == pytest.approx([2.0, 2.0, 1.0])
    made = throughput(course, CALM_STORM)
    assert made["ratio_by_storm"][0] == pytest.approx(1.0)
    assert made["calm_spread"] == pytest.approx(0.6)
    assert made["ratio_range"] == [pytest.approx(0.75), pytest.approx(1.5)]


def struck(kind: str = "kill", at_s: float = 5.2, generation: int = 0) -> Struck:
    return Struck(at_s, at_s, kind, 1, generation)


def recovery(at_s: float, generation: int = 0, seconds: float = 0.8) -> list[TimedEvent]:
    """Noticed 0.1 s before it is told, closed ``seconds`` after it was noticed."""
    lost = RankLost(generation=generation, rank=1, kind="killed")
    closed = RanksClosed(generation=generation + 1, seconds=seconds, num_redone=1, parts={"fence": 0.1, "open": 0.4})
    return [TimedEvent(BEGAN_AT + at_s, lost), TimedEvent(BEGAN_AT + at_s - 0.1 + seconds, closed)]


def found(strikes: list[Struck], told: list[TimedEvent], lines: list[Done] | None = None) -> list[Cost]:
    return costs(strikes, told, BEGAN_AT, Course(lines or steps(0.5, 10, standstill=(5.4, 0.9))), 0.5)


def test_what_a_fault_costs() -> None:
    (cost,) = found([struck()], recovery(5.35))
    assert cost.detected_s == pytest.approx(0.05)
    assert (cost.repaired_s, cost.num_redone, cost.survived) == (0.8, 1, True)
    assert cost.stall_s == pytest.approx(0.9)
    assert parts_of([cost])["open"] == {"median": 0.4, "max": 0.4}
    kill = by_kind([cost, replace(cost, repaired_s=1.2)])["kill"]
    assert (kill["num"], kill["repaired_s"]) == (2, {"median": 1.0, "max": 1.2})


def test_two_faults_of_one_generation_cannot_be_told_apart() -> None:
    both = found([struck(), struck("term", 5.3)], recovery(5.35))
    assert [(cost.is_joined, cost.repaired_s) for cost in both] == [(True, None)] * 2
    assert all(cost.survived for cost in both)


def test_a_fault_that_nobody_came_back_from_is_lost() -> None:
    assert not found([struck()], recovery(5.35)[:1])[0].survived
    assert not found([struck()], [])[0].survived


def test_faults_that_end_nothing_are_noticed_or_not() -> None:
    told = [TimedEvent(BEGAN_AT + 3, SlowRank(rank=1)), TimedEvent(BEGAN_AT + 7, SlowRank(rank=1))]
    told += [TimedEvent(BEGAN_AT + 4, SaveFailed())]
    slow, full = found([struck("slow"), struck("diskfull")], told)
    assert slow.detected_s == pytest.approx(1.8)
    assert full.detected_s is None
    assert slow.survived
    assert full.survived


def sample(**changes: Any) -> Sample:
    held = {"agent_bytes": 50 << 20, "agent_fds": 40, "zygote_bytes": 300 << 20, "zygote_fds": 8}
    return Sample(**{"at": 0.0, **held, "boxes_bytes": 1 << 20, "num_processes": 6, "shm": (), **changes})


@pytest.mark.parametrize(
    "change", [{"agent_fds": 45}, {"agent_bytes": 60 << 20}, {"num_processes": 7}, {"boxes_bytes": 4 << 20}]
)
def test_what_grows_is_a_leak(change: dict[str, int]) -> None:
    calm = [sample(), sample()]
    assert not any(each["is_leak"] for each in growth(calm, calm).values())
    (name,) = change
    grown = growth(calm, [sample(**change)] * 2)
    assert [key for key, each in grown.items() if each["is_leak"]] == [name]


def figures(**changes: Any) -> dict[str, Any]:
    whole = {
        "mix": "light",
        "minutes": 30,
        "seed": 7,
        "layout": "zero=0",
        "load": [1, 1, 1],
        "throughput": throughput(Course(steps(0.5, 60, standstill=(14.0, 0.5))), CALM_STORM),
        "faults": {"planned": 62, "struck": 62, "survived": 62},
        "kinds": by_kind(found([struck()], recovery(5.35))),
        "parts_s": parts_of(found([struck()], recovery(5.35))),
        "growth": growth([sample()], [sample()]),
        "left_over": [],
        "divergence": {"equal": True, "steps": 5, "state": "", "losses_equal": True, "samples_equal": True},
    }
    return {**whole, **changes}


def test_the_goal_wants_all_of_it() -> None:
    assert judge(figures())
    assert not judge(figures(minutes=3)), "a short one proves nothing"
    assert not judge(figures(faults={"planned": 62, "struck": 62, "survived": 61}))
    assert not judge(figures(faults={"planned": 62, "struck": 61, "survived": 61}))
    assert not judge(figures(left_over=["process 1"]))
    assert not judge(figures(divergence={"equal": False}))
    assert not judge(figures(growth=growth([sample()], [sample(agent_fds=99)])))
    slower = throughput(Course(steps(0.5, 60, standstill=(14.0, 1.0))), CALM_STORM)
    assert not judge(figures(throughput=slower))
    assert judge(figures(throughput=slower, mix="all"))
    assert not judge(figures(throughput={**figures()["throughput"], "calm_spread": 0.11})), "nothing was measured"


def test_page_and_picture(tmp_path: Path) -> None:
    course = Course(steps(0.5, 60, standstill=(14.0, 1.0)))
    cost = found([struck()], recovery(5.35))
    draw(course, CALM_STORM, cost, figures()["throughput"], tmp_path / "soak.png", "soak")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    write_page(tmp_path / "soak.md", figures(), cost, "light", 0.97)
    page = (tmp_path / "soak.md").read_text()
    assert "equal in every bit" in page
    assert "| kill | 1 |" in page
    odd = {"equal": False, "steps": 5, "state": "3 tensors", "losses_equal": False, "samples_equal": True}
    write_page(tmp_path / "soak.md", figures(divergence=odd), cost, "light", 0.97)
    assert "DIFFER: losses, 3 tensors" in (tmp_path / "soak.md").read_text()


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_a_minute_of_it_with_shards(tmp_path: Path) -> None:
    options = ["--mix", "light", "--minutes", "0.5", "--faults", "3", "--batch", "8", "--waiting", "--layout", "zero=3"]
    closing = run_script("soak.py", *options, "--out", str(tmp_path / "soak"), timeout_s=230)
    assert closing["name"] == "soak"
    assert closing["figures"]["faults"] == {"planned": 3, "struck": 3, "survived": 3}
    assert is_sound(closing["figures"]), closing["figures"]
    assert not closing["met"], "half a minute proves nothing"
    assert (tmp_path / "soak" / "soak.md").exists()
    assert (tmp_path / "soak" / "soak.png").exists()

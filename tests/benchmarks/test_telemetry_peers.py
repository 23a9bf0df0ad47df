"""Both tools are judged alike, and ratios are those of a round. TraceML need not be installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from telemetry_peers import CAUSES, LANES, compare, is_met, tell
from telemetry_peers_findings import HEALTHY, LOOPS, SILENT, Named, PlantedLoop, judge_ours, judge_theirs, our_job
from telemetry_peers_lane import LaneTurn

from closeranks.doctor.finding import Finding
from tests.benchmarks.scripts import run_script

BY_NAME = {loop.name: loop for loop in LOOPS}
HAS_TRACEML = find_spec("traceml_ai") is not None


def turns(*seconds: float, cpu: float = 1.0) -> list[LaneTurn]:
    return [LaneTurn(one, cpu * one) for one in seconds]


def test_ratios_are_with_to_without_within_a_round() -> None:
    """The machine was busy in the second round; all paid for it."""
    figures = compare(
        {
            "bare": turns(1.0, 10.0),
            "traceml": turns(1.25, 12.5, cpu=2.0),
            "closeranks": turns(2.0, 20.0),
            "closeranks off": turns(2.0, 20.0),
        },
        num_steps=10,
    )
    assert (figures["ratio"]["traceml"]["low"], figures["ratio"]["traceml"]["high"]) == (0.8, 0.8)
    assert figures["cpu_ratio"]["traceml"]["median"] == 0.4
    assert figures["ratio"]["closeranks"]["median"] == 1.0
    assert figures["step_ms"]["bare"]["median"] == 550.0


def test_without_traceml_ours_is_measured_alone_and_the_goal_is_not_met() -> None:
    figures = compare({name: turns(1.0, 1.0) for name in LANES if name != "traceml"}, num_steps=10)
    assert set(figures["ratio"]) == {"closeranks"}
    both = tell({cause: {"closeranks": Named("cause", cause, "", 0.5)} for cause in CAUSES})
    assert not is_met({"overhead": {"short": figures, "long": figures}, "findings": both})


def row(ours: float, theirs: float) -> dict[str, Any]:
    return {"ratio": {"closeranks": {"high": ours}, "traceml": {"median": theirs}}}


@pytest.mark.parametrize(
    ("rows", "named", "met"),
    [
        ({"short": row(1.0, 0.9), "long": row(1.0, 1.0)}, (9, 4), True),
        ({"short": row(0.89, 0.9), "long": row(1.0, 1.0)}, (9, 4), False),
        ({"short": row(1.0, 0.9), "long": row(1.0, 1.0)}, (3, 4), False),
        ({"short": row(1.0, 0.9)}, (9, 4), False),
        ({}, (9, 4), False),
    ],
)
def test_the_goal_is_about_cost_and_causes(rows: dict[str, Any], named: tuple[int, int], met: bool) -> None:
    counts = {tool: {"cause": num} for tool, num in zip(("closeranks", "traceml"), named, strict=True)}
    assert is_met({"overhead": rows, "findings": {"counts": counts}}) is met


def summary(kind: str, ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    """The part of TraceML's ``final_summary.json`` (0.5.0, schema 1.9) that is read."""
    diagnosis = {
        "kind": kind,
        "status": kind.replace("_", "-"),
        "severity": "crit",
        "summary": "Input wait is 87.1% of the typical CPU Step Time.",
        "action": "Increase workers, prefetch, or storage throughput.",
        "metric": "input_wait",
        "phase": "input",
        "score": 0.871,
        "share_pct": 0.871,
        "skew_pct": 0.01,
        "ranks": list(ranks),
        "evidence": {},
    }
    return {"step_time": {"diagnosis": diagnosis, "issues": [diagnosis]}}


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "found"),
    [
        ("slow-store", "INPUT_BOUND", (0,), "cause"),
        ("slow-store", "COMPUTE_BOUND", (), "no"),
        ("slow-rank", "COMPUTE_STRAGGLER", (1,), "cause"),
        ("slow-rank", "COMPUTE_STRAGGLER", (0,), "no"),
        ("garbage", "RESIDUAL_HEAVY", (0,), "place"),
        ("small-micro-batches", "COMPUTE_BOUND", (), "no"),
        ("small-micro-batches", "BALANCED", (), "no"),
    ],
)
def test_traceml_names_a_cause_or_its_place(name: str, kind: str, ranks: tuple[int, ...], found: str) -> None:
    named = judge_theirs(BY_NAME[name], summary(kind, ranks))
    assert (named.found, named.kind, named.gain) == (found, kind, None)
    assert "Increase workers" in named.words


def test_what_traceml_says_second_is_told_apart() -> None:
    (residual,), (input_bound,) = (summary(kind)["step_time"]["issues"] for kind in ("RESIDUAL_HEAVY", "INPUT_BOUND"))
    both = {"step_time": {"issues": [residual, input_bound]}}
    assert judge_theirs(BY_NAME["slow-store"], both).found == "later"
    assert judge_theirs(BY_NAME["garbage"], both).found == "place"


def test_silence_about_a_healthy_run_is_right() -> None:
    assert judge_theirs(PlantedLoop(HEALTHY, {}, SILENT), summary("COMPUTE_BOUND")).found == "cause"
    assert judge_ours("", []).found == "cause"
    assert judge_ours("", [Finding("garbage-collection", "", (), "")]).found == "no"


def test_our_first_finding_is_what_the_doctor_says() -> None:
    first, second = (Finding(cause, "why", (), "do", gain=0.4) for cause in ("input-bound", "straggler"))
    assert judge_ours("input-bound", [first, second]) == Named("cause", "input-bound", "why", 0.4)
    assert judge_ours("straggler", [first, second]).found == "later"
    assert judge_ours("garbage-collection", [first, second]).found == "no"


def test_both_tools_get_the_same_causes_with_the_same_model() -> None:
    assert len({our_job(name).job for name in (*CAUSES, HEALTHY)}) == 1
    assert len(CAUSES) >= 10


@pytest.mark.world
@pytest.mark.slow
def test_lanes_take_turns_and_a_cause_is_planted_in_both() -> None:
    closing = run_script(
        *("telemetry_peers.py", "--row", "short", "--rounds", "2", "--block", "5", "--cause", "slow-store")
    )
    figures = closing["figures"]
    assert set(figures["overhead"]["short"]["step_ms"]) == {name for name in LANES if HAS_TRACEML or name != "traceml"}
    assert figures["overhead"]["short"]["ratio"]["closeranks"]["num"] == 2
    told = figures["findings"]["runs"]["slow-store"]
    assert told["closeranks"]["kind"] == "input-bound"
    assert ("traceml" in told) is HAS_TRACEML is (figures["traceml"] is not None)
    assert not closing["met"], "one row and one cause are not the whole"

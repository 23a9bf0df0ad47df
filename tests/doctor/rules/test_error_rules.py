"""The rules about runs whose result is in doubt: they come first, whatever the speed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from closeranks.core.events import RankLost, Standstill
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import facts

FP16 = {"train": {"precision": "fp16"}, "optim": {"loss_scale": {"init": 65536.0}, "lr": 0.1}}


def _with(made: RunFacts, number: int, **changed: Any) -> RunFacts:
    steps = list(made.steps)
    steps[number] = replace(steps[number], **changed)
    return replace(made, steps=tuple(steps))


def _causes(made: RunFacts) -> list[str]:
    return [one.cause for one in diagnose(made).findings]


def test_a_loss_that_is_not_a_number_comes_before_what_is_slow() -> None:
    made = _with(facts({"data": 0.2}), 7, loss=math.nan)
    assert _causes(made) == ["loss-values", "input-bound"]
    assert "at step 9" in diagnose(made).findings[0].evidence[0]


def test_a_loss_that_jumps() -> None:
    rows = [{}] * 40
    made = facts(rows)
    assert _causes(_with(made, 30, loss=9.0)) == ["loss-spikes"]
    assert _causes(_with(made, 30, loss=2.1)) == []


def test_a_loss_that_grows() -> None:
    made = facts([{}] * 50)
    grown = replace(made, steps=tuple(replace(step, loss=2.0 + 0.05 * step.step) for step in made.steps))
    assert _causes(grown) == ["loss-diverged"]
    assert _causes(replace(made, steps=made.steps[:20])) == []


@pytest.mark.parametrize("num_skipped", [0, 1, 5])
def test_steps_that_fp16_skips(num_skipped: int) -> None:
    made = facts([{}] * 50, settings=FP16)
    for number in range(num_skipped):
        made = _with(made, 3 * number, taken=False, grad_norm=math.inf)
    found = diagnose(made).findings
    assert [one.cause for one in found] == (["loss-scale"] if num_skipped > 1 else [])
    if found:
        assert found[0].gain == pytest.approx(num_skipped / 50)
        assert str(found[0].changes[0]) == 'train.precision="bf16"'


def test_a_worker_that_hung() -> None:
    lost = RankLost(rank=1, step=20, kind="hang", cause="rank 1 made no progress for 5 s")
    found = diagnose(facts({"user_code": 0.2}, events=[lost])).findings
    assert [one.cause for one in found] == ["fault-hang", "user-code"]
    assert "rank 1 made no progress" in found[0].what


@pytest.mark.parametrize(
    ("step", "is_lost", "found"), [(None, False, 0), (15, False, 0), (15, True, 1), (21, False, 1)]
)
def test_a_standstill_that_ended_by_itself_is_no_fault(step: int | None, is_lost: bool, found: int) -> None:
    """The run has taken steps 2 to 21."""
    why = Standstill(step=step, rank=1, kind="loader", cause="rank 1 waits for data")
    lost = [RankLost(kind="hang", step=15)] if is_lost else []
    assert [one.cause for one in diagnose(facts({}, {}, events=[why, *lost])).findings] == ["fault-loader"] * found


def test_a_standstill_that_was_explained_says_more_than_the_hang() -> None:
    why = Standstill(step=20, rank=1, kind="branch", cause="rank 1 took another branch", lines=["rank 1: waiting"])
    lost = RankLost(rank=1, step=20, kind="hang", cause="rank 1 made no progress for 5 s")
    killed = RankLost(rank=0, step=30, kind="killed", cause="killed by SIGKILL")
    found = diagnose(facts(events=[why, lost, killed])).findings
    assert [one.cause for one in found] == ["fault-branch", "fault-killed"]
    assert "took another branch" in found[0].what
    assert "rank 1: waiting" in found[0].evidence


def test_leaving_by_request_is_not_a_fault() -> None:
    assert _causes(facts(events=[RankLost(kind="preempted"), RankLost(kind="resize")])) == []

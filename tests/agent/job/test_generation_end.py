"""Of a generation that is over, the one who began it is named: a host that was lost before those who missed it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from closeranks.agent.detection.failure import FailureReport
from closeranks.agent.detection.host_report import HostReport
from closeranks.agent.detection.root_cause import WorkerReport, external_cause
from closeranks.agent.job.generation_end import conclude, find_lost_host, root_cause_of
from closeranks.agent.membership.effects import EndCause, GenerationSettled
from closeranks.core.errors import RunFailed

ECHO = FailureReport("RuntimeError", "Connection closed by peer", "", "", 10.0, 5)
FACTS: dict[str, Any] = {"workers": []}


def settled(cause: EndCause, *told: str) -> GenerationSettled:
    return GenerationSettled(3, cause, dict.fromkeys(told, FACTS), ())


def test_a_member_that_told_nothing_was_lost_whoever_complained_first() -> None:
    over = settled(EndCause("fault", "h0", "a worker failed"), "h0")
    assert find_lost_host(over, ["h0", "h1"]) == "h1"
    whole = HostReport(workers=(WorkerReport(0, step=5, failure=ECHO),))
    verdict = root_cause_of(over, whole, "h1", next_step=5, leaving=None)
    assert verdict is not None
    assert (verdict.kind, verdict.culprit, verdict.cause) == ("host", -1, "h1 was lost: no heartbeat arrived in time")


def test_of_several_the_one_that_ended_the_generation_is_named() -> None:
    over = settled(EndCause("lost", "h2", "its connection was closed"), "h0")
    assert find_lost_host(over, ["h0", "h1", "h2"]) == "h2"
    verdict = root_cause_of(over, HostReport(), "h2", next_step=1, leaving=None)
    assert verdict is not None
    assert verdict.cause == "h2 was lost: its connection was closed"


def test_where_all_told_their_workers_are_judged() -> None:
    over = settled(EndCause("fault", "h0"), "h0", "h1")
    assert find_lost_host(over, ["h0", "h1"]) == ""
    dead = WorkerReport(1, step=5, status=-9, died_at=9.0)
    verdict = root_cause_of(
        over, HostReport(workers=(WorkerReport(0, step=5, failure=ECHO), dead)), "", next_step=5, leaving=None
    )
    assert verdict is not None
    assert (verdict.kind, verdict.culprit) == ("killed", 1)


def test_an_end_by_agreement_has_the_reason_for_which_it_was_asked() -> None:
    over, why = settled(EndCause("done"), "h0"), external_cause("preempted", "h1 has to leave")
    left = [WorkerReport(rank, status=0, is_finished=True, ended_for=("regroup",)) for rank in range(2)]
    assert root_cause_of(over, HostReport(workers=tuple(left)), "", next_step=1, leaving=why) is why
    for other in (replace(left[1], ended_for=()), replace(left[1], status=1)):
        assert root_cause_of(over, HostReport(workers=(left[0], other)), "", next_step=1, leaving=why) is None
    assert root_cause_of(over, HostReport(), "", next_step=1, leaving=None) is None


def test_a_run_is_drained_if_any_worker_ended_for_a_drain() -> None:
    left = [WorkerReport(rank, status=0, is_finished=True) for rank in range(2)]
    told = HostReport(workers=(left[0], replace(left[1], ended_for=("drain",))))
    read = HostReport.from_fields(json.loads(json.dumps(told.to_fields(5.0))), 5.0)
    assert read == told
    assert conclude(settled(EndCause("done"), "h0"), read, None, print).reason == "drained"
    assert conclude(settled(EndCause("done"), "h0"), HostReport(workers=tuple(left)), None, print).reason == "finished"


def test_workers_that_were_ended_with_a_lost_host_have_not_finished() -> None:
    """Without recovery: those of this host were fenced, and none of them failed."""
    fenced = HostReport(workers=(WorkerReport(0, step=500),))
    over = settled(EndCause("lost", "h1", "it was not heard for 3 s"), "h0")
    with pytest.raises(RunFailed, match="before they finished: h1: it was not heard for 3 s"):
        conclude(over, fenced, None, print)
    done = HostReport(workers=(WorkerReport(0, step=500, status=0, is_finished=True),))
    assert conclude(settled(EndCause("done"), "h0"), done, None, print).reason == "finished"

"""What counts as a fault, and when two are the same."""

from __future__ import annotations

import pytest

from closeranks.agent.detection.root_cause import CauseKind, external_cause
from closeranks.agent.job.fault_log import (
    NOT_FAULTS,
    FaultLog,
    faults_within,
    num_repeats,
    steps_done,
    summarize_faults,
)
from closeranks.core.errors import DataError, RunFailed
from tests.agent.faults import fault, raised


def logged(
    log: FaultLog, step: int | None, num_done: int, kind: CauseKind = "exception", signature: str = "x"
) -> FaultLog:
    verdict = raised(step, kind=kind, signature=signature)
    return log.add(verdict, at=float(len(log.faults)), generation=len(log.faults), host="a", num_done=num_done)


def repeats(*ends: tuple[int | None, int]) -> int:
    log = FaultLog()
    for step, num_done in ends:
        log = logged(log, step, num_done)
    return num_repeats(log.faults)


def test_the_log_keeps_what_the_verdict_said() -> None:
    log = FaultLog().add(raised(5, culprit=3), at=1.5, generation=2, host="a", num_done=4)
    (entry,) = log.faults
    assert (entry.at, entry.generation, entry.host, entry.rank, entry.step) == (1.5, 2, "a", 3, 5)
    assert (entry.kind, entry.signature, entry.cause, entry.num_done) == ("exception", "x", "ValueError: x", 4)
    assert not entry.is_user_error
    assert (
        FaultLog()
        .add(raised(5, error=DataError("no")), at=0, generation=0, host="", num_done=4)
        .faults[0]
        .is_user_error
    )


@pytest.mark.parametrize("kind", sorted(NOT_FAULTS))
def test_an_end_that_nothing_is_wrong_with_is_no_fault(kind: CauseKind) -> None:
    log = FaultLog().add(external_cause(kind, "it was asked to"), at=0.0, generation=0, host="a", num_done=7)
    assert log == FaultLog((), 7), "but how far the run got is kept"


def test_the_same_step_twice_is_a_repeat() -> None:
    assert repeats((43, 42), (43, 42)) == 2


def test_redone_steps_are_no_progress() -> None:
    """A copy every five steps: 41 and 42 are done again each time, 43 never."""
    assert repeats((43, 42), (41, 40), (43, 42)) == 2


def test_a_step_that_was_finished_between_is_not_to_blame() -> None:
    """43 fails, is finished, then a fault at 44 throws the run back, and chance strikes at 43 again."""
    assert repeats((43, 42), (44, 43), (43, 42)) == 1
    assert repeats((43, 42), (44, 43), (43, 42), (43, 42)) == 2


def test_a_generation_that_ended_by_agreement_may_have_made_the_progress() -> None:
    log = logged(FaultLog(), 43, 42)
    log = log.add(external_cause("resize", "a host joined", step=50), at=1.0, generation=1, host="", num_done=49)
    assert num_repeats(logged(log, 43, 42).faults) == 1


def test_other_ranks_that_are_a_step_ahead_do_not_finish_the_one_that_was_struck() -> None:
    """It dies each time while it updates its weights, when the others may be at the next step already."""
    assert repeats((43, 42), (43, 43)) == 2


def test_another_step_or_another_signature_is_another_fault() -> None:
    log = logged(logged(FaultLog(), 43, 42), 42, 41)
    assert num_repeats(log.faults) == 1
    assert num_repeats(logged(log, 42, 41, signature="y").faults) == 1
    assert num_repeats(logged(log, 42, 41, kind="hang").faults) == 1


def test_faults_before_the_first_step_are_compared_too() -> None:
    assert repeats((None, 0), (None, 0)) == 2
    assert repeats((None, 0), (9, 8), (None, 0)) == 1


@pytest.mark.parametrize("kind", ["host", "zygote", "stopped"])
def test_what_no_step_can_do_is_never_a_repeat(kind: CauseKind) -> None:
    log = logged(logged(FaultLog(), 43, 42, kind), 43, 42, kind)
    assert num_repeats(log.faults) == 0


def test_without_faults_there_are_no_repeats() -> None:
    assert num_repeats(()) == 0


def test_steps_done_are_those_of_the_last() -> None:
    assert steps_done([5, 6, 5]) == 4
    assert steps_done([5, None]) == 0
    assert steps_done([]) == 0


def test_the_window_is_open_at_its_far_end() -> None:
    faults = [fault(at=at) for at in (0.0, 10.0, 10.5, 20.0)]
    assert [one.at for one in faults_within(faults, 10.0, 20.0)] == [10.5, 20.0]


def test_a_tally_names_kinds_and_the_worst_host() -> None:
    faults = [fault(kind=kind, host=host) for kind, host in [("killed", "a"), ("killed", "b"), ("hang", "b")]]
    assert summarize_faults(faults) == "2 killed, 1 hang; 2 of them on b"
    assert summarize_faults(faults[:1]) == "1 killed"


def test_what_no_worker_tells_has_a_verdict_all_the_same() -> None:
    verdict = external_cause("host", "host b has not answered for 3 s", step=4)
    assert (verdict.culprit, verdict.kind, verdict.step, verdict.is_silent) == (-1, "host", 4, True)
    assert isinstance(verdict.error, RunFailed)
    assert str(verdict.error) == "host b has not answered for 3 s"
    lost = external_cause("zygote", "the zygote was lost\nits log", error=RunFailed("the zygote was lost\nits log"))
    assert lost.cause == "the zygote was lost"
    assert str(lost.error).endswith("its log")

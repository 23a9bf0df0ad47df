"""The verdict over made-up facts: who is blamed, and what is said."""

from __future__ import annotations

import signal
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.detection.failure import FailureReport
from closeranks.agent.detection.root_cause import WorkerReport, describe_ranks, find_root_cause
from closeranks.core.errors import CloseranksError, ConfigError, DataError, Problem, RunFailed, UserError, encode


def raised(rank: int, at: float, message: str = "boom", *, echo: bool = False, **changes: Any) -> WorkerReport:
    failure = FailureReport("ValueError", message, "train.py:3 in f", "Traceback", at, 5, echo)
    settings = {"step": 5, "status": 1, "died_at": at + 0.01, "log": f"rank-{rank}.log"}
    return WorkerReport(rank, failure=failure, **{**settings, **changes})


def killed(rank: int, at: float, number: int = signal.SIGKILL, **changes: Any) -> WorkerReport:
    settings = {"step": 12, "phase": "saving", "log": f"rank-{rank}.log"}
    return WorkerReport(rank, status=-number, died_at=at, **{**settings, **changes})


def fenced(rank: int) -> WorkerReport:
    return WorkerReport(rank, step=12, status=-signal.SIGKILL)


def ours(rank: int, error: CloseranksError, at: float = 1.0) -> WorkerReport:
    failure = FailureReport(type(error).__name__, str(error), "", "", at, None, False, encode(error))
    return WorkerReport(rank, failure=failure, status=error.exit_code, died_at=at)


def left(rank: int, at: float, *, finished: bool) -> WorkerReport:
    return WorkerReport(rank, status=0, died_at=at, is_finished=finished)


def test_a_silent_death_goes_before_earlier_exceptions() -> None:
    assert find_root_cause([raised(0, 1.0), killed(1, 1.2), fenced(2)]).culprit == 1


def test_of_two_silent_deaths_the_first_is_the_cause() -> None:
    assert find_root_cause([killed(0, 2.0), killed(1, 1.0)]).culprit == 1


def test_exceptions_go_by_time_and_echoes_last() -> None:
    facts = [raised(0, 1.0, echo=True), raised(1, 3.0), raised(2, 2.0), fenced(3)]
    assert find_root_cause(facts).culprit == 2


def test_among_echoes_alone_the_first_is_blamed() -> None:
    assert find_root_cause([raised(0, 2.0, echo=True), raised(1, 1.0, echo=True)]).culprit == 1


def test_an_abort_well_after_an_exception_is_its_echo() -> None:
    assert find_root_cause([raised(0, 1.0), killed(1, 1.5, signal.SIGABRT)]).culprit == 0


def test_an_abort_whose_death_is_seen_a_little_late_is_still_the_cause() -> None:
    assert find_root_cause([raised(0, 1.0), killed(1, 1.05, signal.SIGABRT)]).culprit == 1


def test_an_exit_without_a_word_is_silent_and_an_exit_after_one_is_not() -> None:
    silent = WorkerReport(1, status=3, died_at=2.0)
    assert find_root_cause([raised(0, 1.0), silent]).culprit == 1
    assert "exited with code 3 without reporting an error" in str(find_root_cause([silent]).error)
    assert find_root_cause([raised(0, 1.0, status=-signal.SIGABRT), raised(1, 0.5)]).culprit == 1


def test_a_rank_that_left_in_the_middle_is_blamed_before_its_echoes() -> None:
    verdict = find_root_cause([raised(0, 1.0, "Connection closed by peer", echo=True), left(1, 0.9, finished=False)])
    assert verdict.culprit == 1
    assert "exited with code 0 before its work was done" in str(verdict.error)


def test_a_rank_that_had_finished_is_not_blamed() -> None:
    verdict = find_root_cause([raised(0, 1.0, "Connection closed by peer", echo=True), left(1, 0.9, finished=True)])
    assert verdict.culprit == 0
    assert "rank 1 had finished before" in str(verdict.error)


def test_without_a_failure_there_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="no worker has failed"):
        find_root_cause([fenced(0), left(1, 1.0, finished=True)])


def test_the_report_of_a_silent_death() -> None:
    tail = ("epoch 1", "x" * 500)
    report = str(find_root_cause([fenced(0), killed(1, 1.0, log_tail=tail), fenced(2), fenced(3)]).error).splitlines()
    assert report == [
        "rank 1 of 4 failed at step 12 (saving): killed by SIGKILL; if nobody sent it, the kernel's out-of-memory"
        " killer did: see dmesg",
        "ranks 0, 2 and 3 stopped because of it",
        "its log, rank-1.log, ends with:",
        "  | epoch 1",
        "  | " + "x" * 200,
    ]


def test_the_report_of_an_exception() -> None:
    error = find_root_cause([raised(0, 1.0), fenced(1)]).error
    assert isinstance(error, RunFailed)
    assert (error.rank, error.step) == (0, 5)
    assert str(error).splitlines() == [
        "rank 0 of 2 failed at step 5: ValueError: boom (train.py:3 in f)",
        "rank 1 stopped because of it",
        "the whole traceback is in rank-0.log",
    ]


def test_what_the_kernel_counted_is_said() -> None:
    report = str(find_root_cause([killed(0, 1.0)], num_oom_kills=1).error)
    assert "probably by the kernel's out-of-memory killer" in report
    assert "its log, rank-0.log, is empty" in report


def test_a_world_of_one_speaks_of_nobody_else() -> None:
    assert len(str(find_root_cause([raised(0, 1.0)]).error).splitlines()) == 2


def test_an_exit_before_the_first_step_without_known_status() -> None:
    report = str(find_root_cause([WorkerReport(0, phase="starting", died_at=1.0)]).error)
    assert report == "rank 0 of 1 failed before its first step (starting): died; its exit status is not known"


def test_all_failing_alike_is_said_so() -> None:
    assert "ranks 1-3 failed in the same way" in str(find_root_cause([raised(rank, rank) for rank in range(4)]).error)


def test_a_second_cause_is_named_beside_the_first() -> None:
    facts = [
        raised(0, 1.0),
        raised(1, 1.1, "bang\nand more"),
        raised(2, 1.2, "crash"),
        raised(3, 1.3, "thud"),
        fenced(4),
    ]
    line = str(find_root_cause(facts).error).splitlines()[1]
    assert line == (
        "rank 4 stopped because of it; rank 1 failed too: ValueError: bang; "
        "rank 2 failed too: ValueError: crash (train.py:3 in f); so did 1 more"
    )


def test_a_users_mistake_on_all_ranks_is_the_error_itself() -> None:
    error = find_root_cause([ours(rank, DataError("no data", "Get some."), rank) for rank in range(3)]).error
    assert isinstance(error, DataError)
    assert str(error) == "no data. Get some."


def test_a_users_mistake_on_one_rank_carries_it() -> None:
    assert str(find_root_cause([fenced(0), ours(1, DataError("no data"))]).error) == "no data (rank 1)."
    assert str(find_root_cause([ours(0, DataError("no data"))]).error) == "no data."
    config = find_root_cause([fenced(0), ours(1, ConfigError([Problem("a", "is odd")]))]).error
    assert isinstance(config, UserError)
    assert "a: is odd" in str(config)


def test_a_users_mistake_that_came_after_a_death_is_not_the_cause() -> None:
    assert find_root_cause([ours(0, DataError("no data")), killed(1, 2.0)]).culprit == 1


def test_an_error_of_ours_that_nobody_can_mend_is_reported() -> None:
    error = find_root_cause([fenced(0), ours(1, CloseranksError("rank 0 has not opened its store within 60 s"))]).error
    assert isinstance(error, RunFailed)
    assert "rank 1 of 2 failed before its first step: rank 0 has not opened its store within 60 s." in str(error)


def test_sys_exit_is_named() -> None:
    failure = FailureReport("SystemExit", "3", "train.py:9 in main", "", 1.0)
    report = str(find_root_cause([WorkerReport(0, status=3, died_at=1.0, failure=failure)]).error)
    assert "sys.exit(3) was called (train.py:9 in main)" in report


def test_the_verdict_does_not_depend_on_the_order_of_the_facts() -> None:
    facts = [raised(0, 1.0, echo=True), killed(1, 1.2), raised(2, 0.9), fenced(3)]
    assert {find_root_cause(order).culprit for order in permutations(facts)} == {1}
    assert len({str(find_root_cause(order).error) for order in permutations(facts)}) == 1


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_words_name_each_once(ranks: set[int]) -> None:
    text = describe_ranks(sorted(ranks)).split(" ", 1)[1]
    named: list[int] = []
    for part in text.replace(" and ", ", ").split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


# --- what is passed on to the policy


def still(rank: int, why: str = "hang", **changes: Any) -> WorkerReport:
    settings = {"step": 12, "phase": "reducing gradients", "status": -signal.SIGKILL, "hang_s": 5.25}
    return WorkerReport(rank, hang_kind=why, **{**settings, **changes})


@pytest.mark.parametrize(
    ("fact", "num_oom_kills", "kind", "is_silent"),
    [
        (killed(1, 1.0), 0, "killed", True),
        (killed(1, 1.0, signal.SIGTERM), 0, "killed", True),
        (killed(1, 1.0, signal.SIGSEGV), 0, "killed", False),
        (killed(1, 1.0, signal.SIGSEGV), 1, "killed", False),
        (killed(1, 1.0), 1, "oom", False),
        (raised(1, 1.0), 0, "exception", False),
        (raised(1, 1.0), 1, "exception", False),
        (raised(1, 1.0, "Connection closed by peer", echo=True), 0, "exception", True),
        (WorkerReport(1, status=3, died_at=1.0), 0, "exception", False),
        (left(1, 1.0, finished=False), 0, "exception", False),
        (WorkerReport(1, died_at=1.0), 0, "killed", True),
        (still(1), 0, "hang", False),
        (still(1), 1, "hang", False),
        (still(1, "stopped"), 0, "stopped", False),
        (ours(1, DataError("no data")), 0, "exception", False),
    ],
)
def test_each_culprit_has_a_kind(fact: WorkerReport, num_oom_kills: int, kind: str, is_silent: bool) -> None:
    verdict = find_root_cause([fenced(0), fact], num_oom_kills)
    assert (verdict.culprit, verdict.kind, verdict.is_silent) == (1, kind, is_silent)
    assert verdict.step == (fact.failure.step if fact.failure else fact.step)
    assert verdict.cause
    assert "\n" not in verdict.cause


def test_the_cause_is_the_first_line() -> None:
    assert find_root_cause([raised(0, 1.0, "bang\nand more")]).cause == "ValueError: bang"
    assert find_root_cause([killed(0, 1.0, signal.SIGSEGV)]).cause == "killed by SIGSEGV: a crash in native code"


def test_the_same_exception_has_the_same_signature_on_any_rank_at_any_time() -> None:
    one = find_root_cause([raised(0, 1.0, "tensor at 0x7f12 has 17 bytes of 4096"), fenced(1)])
    other = find_root_cause([fenced(0), raised(1, 9.0, "tensor at 0x88ab has 3 bytes of 4096")])
    assert one.signature == other.signature == "ValueError at train.py:3 in f: tensor at # has # bytes of #"
    assert find_root_cause([raised(0, 1.0, "bang")]).signature != find_root_cause([raised(0, 1.0, "boom")]).signature


def test_signatures_of_silent_ends_tell_them_apart() -> None:
    facts = [
        killed(0, 1.0),
        killed(0, 1.0, signal.SIGSEGV),
        still(0),
        still(0, phase="computing gradients"),
        still(0, "stopped"),
        WorkerReport(0, status=3, died_at=1.0),
        WorkerReport(0, status=4, died_at=1.0),
    ]
    assert (
        len({find_root_cause([fact]).signature for fact in facts} | {find_root_cause([killed(0, 1.0)], 1).signature})
        == 8
    )


def test_a_mistake_of_the_persons_is_told_from_a_fault() -> None:
    assert find_root_cause([ours(0, DataError("no data"))]).is_user_error
    assert not find_root_cause([raised(0, 1.0)]).is_user_error
    assert not find_root_cause([ours(0, CloseranksError("the store is not open"))]).is_user_error


def test_the_report_of_a_hang() -> None:
    report = str(find_root_cause([fenced(0), still(1, log="rank-1.log", log_tail=("File a.py",))]).error).splitlines()
    assert report == [
        "rank 1 of 2 failed at step 12 (reducing gradients): made no progress for 5.25 s; declared hung",
        "rank 0 stopped because of it",
        "its log, rank-1.log, ends with:",
        "  | File a.py",
    ]
    assert "stopped by SIGSTOP for 5.25 s" in str(find_root_cause([fenced(0), still(1, "stopped")]).error)
    seen = still(1, hang_cause="made no progress for 5.2 s, reducing gradients; busy in one thread")
    first = str(find_root_cause([fenced(0), seen]).error).splitlines()[0]
    assert first == f"rank 1 of 2 failed at step 12: {seen.hang_cause}; declared hung"


def test_where_all_stand_still_nobody_is_the_culprit() -> None:
    verdict = find_root_cause([still(0), still(1)])
    assert (verdict.culprit, verdict.kind) == (-1, "hang")
    assert str(verdict.error) == (
        "all 2 ranks failed at step 12 (reducing gradients): made no progress for 5.25 s; declared hung"
    )
    assert find_root_cause([still(0)]).culprit == 0
    assert find_root_cause([still(0), still(1), fenced(2)]).culprit == 0


def test_a_hang_goes_between_the_dead_and_those_that_spoke() -> None:
    assert find_root_cause([still(0), killed(1, 9.0)]).culprit == 1
    assert find_root_cause([raised(0, 1.0), still(1)]).culprit == 1
    assert find_root_cause([killed(0, 1.0, signal.SIGABRT), still(1)]).culprit == 1
    assert find_root_cause([raised(0, 1.0, "Connection closed by peer", echo=True), still(1)]).culprit == 1


def test_one_that_spoke_or_died_after_all_is_judged_by_that() -> None:
    assert find_root_cause([raised(0, 1.0, hang_kind="hang")]).kind == "exception"
    assert find_root_cause([killed(0, 1.0, hang_kind="hang")]).kind == "killed"
    assert (
        find_root_cause([raised(0, 1.0, "Connection closed by peer", echo=True, hang_kind="hang", died_at=None)]).kind
        == "hang"
    )

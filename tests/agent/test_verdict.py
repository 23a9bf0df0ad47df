"""The verdict over made-up facts: who is blamed, and what is said."""

from __future__ import annotations

import signal
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.failure import FailureReport
from closeranks.agent.verdict import WorkerFact, _ranks, judge
from closeranks.core.errors import CloseranksError, ConfigError, DataError, Problem, RunFailed, UserError, encode


def raised(rank: int, at: float, message: str = "boom", *, echo: bool = False, **changes: Any) -> WorkerFact:
    failure = FailureReport("ValueError", message, "train.py:3 in f", "Traceback", at, 5, echo)
    settings = {"step": 5, "status": 1, "died_at": at + 0.01, "log": f"rank-{rank}.log"}
    return WorkerFact(rank, failure=failure, **{**settings, **changes})


def killed(rank: int, at: float, number: int = signal.SIGKILL, **changes: Any) -> WorkerFact:
    settings = {"step": 12, "phase": "saving", "log": f"rank-{rank}.log"}
    return WorkerFact(rank, status=-number, died_at=at, **{**settings, **changes})


def fenced(rank: int) -> WorkerFact:
    return WorkerFact(rank, step=12, status=-signal.SIGKILL)


def ours(rank: int, error: CloseranksError, at: float = 1.0) -> WorkerFact:
    failure = FailureReport(type(error).__name__, str(error), "", "", at, None, False, encode(error))
    return WorkerFact(rank, failure=failure, status=error.exit_code, died_at=at)


def left(rank: int, at: float, *, finished: bool) -> WorkerFact:
    return WorkerFact(rank, status=0, died_at=at, is_finished=finished)


def test_a_silent_death_goes_before_earlier_exceptions() -> None:
    assert judge([raised(0, 1.0), killed(1, 1.2), fenced(2)]).culprit == 1


def test_of_two_silent_deaths_the_first_is_the_cause() -> None:
    assert judge([killed(0, 2.0), killed(1, 1.0)]).culprit == 1


def test_exceptions_go_by_time_and_echoes_last() -> None:
    facts = [raised(0, 1.0, echo=True), raised(1, 3.0), raised(2, 2.0), fenced(3)]
    assert judge(facts).culprit == 2


def test_among_echoes_alone_the_first_is_blamed() -> None:
    assert judge([raised(0, 2.0, echo=True), raised(1, 1.0, echo=True)]).culprit == 1


def test_an_abort_well_after_an_exception_is_its_echo() -> None:
    assert judge([raised(0, 1.0), killed(1, 1.5, signal.SIGABRT)]).culprit == 0


def test_an_abort_whose_death_is_seen_a_little_late_is_still_the_cause() -> None:
    assert judge([raised(0, 1.0), killed(1, 1.05, signal.SIGABRT)]).culprit == 1


def test_an_exit_without_a_word_is_silent_and_an_exit_after_one_is_not() -> None:
    silent = WorkerFact(1, status=3, died_at=2.0)
    assert judge([raised(0, 1.0), silent]).culprit == 1
    assert "exited with code 3 without reporting an error" in str(judge([silent]).error)
    assert judge([raised(0, 1.0, status=-signal.SIGABRT), raised(1, 0.5)]).culprit == 1


def test_a_rank_that_left_in_the_middle_is_blamed_before_its_echoes() -> None:
    verdict = judge([raised(0, 1.0, "Connection closed by peer", echo=True), left(1, 0.9, finished=False)])
    assert verdict.culprit == 1
    assert "exited with code 0 while the other ranks still needed it" in str(verdict.error)


def test_a_rank_that_had_finished_is_not_blamed() -> None:
    verdict = judge([raised(0, 1.0, "Connection closed by peer", echo=True), left(1, 0.9, finished=True)])
    assert verdict.culprit == 0
    assert "rank 1 had finished before" in str(verdict.error)


def test_without_a_failure_there_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="no worker has failed"):
        judge([fenced(0), left(1, 1.0, finished=True)])


def test_the_report_of_a_silent_death() -> None:
    tail = ("epoch 1", "x" * 500)
    report = str(judge([fenced(0), killed(1, 1.0, log_tail=tail), fenced(2), fenced(3)]).error).splitlines()
    assert report == [
        "rank 1 of 4 failed at step 12 (saving): killed by SIGKILL; if nobody sent it, the kernel's out-of-memory"
        " killer did: see dmesg",
        "ranks 0, 2 and 3 stopped because of it",
        "its log, rank-1.log, ends with:",
        "  | epoch 1",
        "  | " + "x" * 200,
    ]


def test_the_report_of_an_exception() -> None:
    error = judge([raised(0, 1.0), fenced(1)]).error
    assert isinstance(error, RunFailed)
    assert (error.rank, error.step) == (0, 5)
    assert str(error).splitlines() == [
        "rank 0 of 2 failed at step 5: ValueError: boom (train.py:3 in f)",
        "rank 1 stopped because of it",
        "the whole traceback is in rank-0.log",
    ]


def test_what_the_kernel_counted_is_said() -> None:
    report = str(judge([killed(0, 1.0)], num_oom_kills=1).error)
    assert "out-of-memory killer it seems" in report
    assert "its log, rank-0.log, is empty" in report


def test_a_world_of_one_speaks_of_nobody_else() -> None:
    assert len(str(judge([raised(0, 1.0)]).error).splitlines()) == 2


def test_an_exit_before_the_first_step_without_known_status() -> None:
    report = str(judge([WorkerFact(0, phase="starting", died_at=1.0)]).error)
    assert report == "rank 0 of 1 failed before its first step (starting): died; its exit status is not known"


def test_all_failing_alike_is_said_so() -> None:
    assert "ranks 1-3 failed in the same way" in str(judge([raised(rank, rank) for rank in range(4)]).error)


def test_a_second_cause_is_named_beside_the_first() -> None:
    facts = [
        raised(0, 1.0),
        raised(1, 1.1, "bang\nand more"),
        raised(2, 1.2, "crash"),
        raised(3, 1.3, "thud"),
        fenced(4),
    ]
    line = str(judge(facts).error).splitlines()[1]
    assert line == (
        "rank 4 stopped because of it; rank 1 failed too: ValueError: bang; "
        "rank 2 failed too: ValueError: crash (train.py:3 in f); so did 1 more"
    )


def test_a_users_mistake_on_all_ranks_is_the_error_itself() -> None:
    error = judge([ours(rank, DataError("no data", "Get some."), rank) for rank in range(3)]).error
    assert isinstance(error, DataError)
    assert str(error) == "no data. Get some."


def test_a_users_mistake_on_one_rank_carries_it() -> None:
    assert str(judge([fenced(0), ours(1, DataError("no data"))]).error) == "no data (rank 1)."
    assert str(judge([ours(0, DataError("no data"))]).error) == "no data."
    config = judge([fenced(0), ours(1, ConfigError([Problem("a", "is odd")]))]).error
    assert isinstance(config, UserError)
    assert "a: is odd" in str(config)


def test_a_users_mistake_that_came_after_a_death_is_not_the_cause() -> None:
    assert judge([ours(0, DataError("no data")), killed(1, 2.0)]).culprit == 1


def test_an_error_of_ours_that_nobody_can_mend_is_reported() -> None:
    error = judge([fenced(0), ours(1, CloseranksError("rank 0 has not opened its store within 60 s"))]).error
    assert isinstance(error, RunFailed)
    assert "rank 1 of 2 failed before its first step: rank 0 has not opened its store within 60 s." in str(error)


def test_sys_exit_is_named() -> None:
    failure = FailureReport("SystemExit", "3", "train.py:9 in main", "", 1.0)
    report = str(judge([WorkerFact(0, status=3, died_at=1.0, failure=failure)]).error)
    assert "sys.exit(3) was called (train.py:9 in main)" in report


def test_the_verdict_does_not_depend_on_the_order_of_the_facts() -> None:
    facts = [raised(0, 1.0, echo=True), killed(1, 1.2), raised(2, 0.9), fenced(3)]
    assert {judge(order).culprit for order in permutations(facts)} == {1}
    assert len({str(judge(order).error) for order in permutations(facts)}) == 1


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_words_name_each_once(ranks: set[int]) -> None:
    text = _ranks(sorted(ranks)).split(" ", 1)[1]
    named: list[int] = []
    for part in text.replace(" and ", ", ").split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)

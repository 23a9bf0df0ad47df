from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from closeranks.core.errors import ConfigError, DataError, Problem, RunFailed
from closeranks.core.world import World
from closeranks.run.worker import error_output
from closeranks.run.worker.error_output import STORE_LOST, ReportTurn, describe_failure, print_error, report_turn

MISTAKE = ConfigError([Problem("train.steps", "is missing")])
MISSING = DataError("the file is not here")
ECHO = RuntimeError("[/build/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:1260. This is typically a crash.")
BUG = TypeError("unsupported operand")


def rank(number: int) -> World:
    return World(rank=number, size=4, launcher="slurm")


@pytest.mark.parametrize("error", [MISTAKE, MISSING, ECHO, BUG])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_with_a_store_the_first_to_fail_speaks(error: Exception, number: int) -> None:
    assert report_turn(error, rank(number), 1) is ReportTurn.NOW
    assert report_turn(error, rank(number), 2) is ReportTurn.NEVER


@pytest.mark.parametrize("error", [MISTAKE, MISSING, ECHO, BUG])
def test_without_a_store_the_lead_speaks(error: Exception) -> None:
    assert report_turn(error, rank(0), None) is ReportTurn.NOW


def test_a_mistake_in_the_job_is_left_to_the_lead() -> None:
    assert report_turn(MISTAKE, rank(3), None) is ReportTurn.EXIT_LATE


@pytest.mark.parametrize("error", [MISSING, BUG])
def test_what_may_be_this_hosts_alone_is_told_late_rather_than_never(error: Exception) -> None:
    assert report_turn(error, rank(3), None) is ReportTurn.AFTER_RANK_0


def test_when_the_lead_is_lost_one_of_the_others_says_so() -> None:
    assert [report_turn(ECHO, rank(number), STORE_LOST) for number in (1, 2, 3)] == [
        ReportTurn.NOW,
        ReportTurn.NEVER,
        ReportTurn.NEVER,
    ]


@pytest.mark.parametrize("number", [1, 3])
def test_what_the_lead_met_before_it_left_is_not_told_again(number: int) -> None:
    assert report_turn(MISSING, rank(number), STORE_LOST) is ReportTurn.NEVER


def test_our_own_errors_are_told_as_they_are() -> None:
    assert describe_failure(MISSING, rank(1), 0) is MISSING


def test_a_lost_rank_is_one_sentence_without_the_source_line_of_gloo() -> None:
    account = describe_failure(ECHO, rank(2), 17)
    assert isinstance(account, RunFailed)
    assert str(account).startswith(
        "rank 2 lost another rank after step 17: Connection closed by peer [10.0.0.1]:1260. The rank that the launcher"
    )


def test_a_bug_keeps_its_traceback() -> None:
    try:
        raise BUG
    except TypeError as error:
        account = str(describe_failure(error, rank(2), 3))
    assert account.startswith("rank 2 failed after step 3:\nTraceback")
    assert "raise BUG" in account


@pytest.fixture
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("turn", "speaks", "waits"),
    [
        (ReportTurn.NOW, True, False),
        (ReportTurn.AFTER_RANK_0, True, True),
        (ReportTurn.NEVER, False, False),
        (ReportTurn.EXIT_LATE, False, True),
    ],
)
def test_speaking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], turn: ReportTurn, speaks: bool, waits: bool
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    print_error(MISSING, turn)
    assert capsys.readouterr().err == ("closeranks: the file is not here.\n" if speaks else "")
    assert bool(waited) == waits


@pytest.mark.usefixtures("_restored")
def test_a_waiting_rank_that_the_launcher_ends_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(error_output.os, "_exit", left.append)
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    print_error(MISTAKE, ReportTurn.EXIT_LATE)
    assert left == [2]

"""Workers that wait for one of another host are not given up for it."""

from dataclasses import replace

import pytest

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.hang_reports import HangReports, decode_hang, encode_hang
from closeranks.agent.detection.progress import WorkerPhase, WorkerProgress
from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.membership.field_codecs import ProtocolError

HOST_OF = {0: "h0", 1: "h1"}
HOOK, WAITING = WorkerProgress(5, WorkerPhase.HOOK, 0.0), WorkerProgress(6, WorkerPhase.REDUCE, 0.0)
PROGRESS_OF = {0: HOOK, 1: WAITING}
OF_THE_WAITING = Hang((1,), 6, WorkerPhase.REDUCE, 1.0, 5.0)
OF_THE_SLOW = Hang((0,), 5, WorkerPhase.HOOK, 1.0, 600.0)


def test_a_claim_travels_as_an_age() -> None:
    hang = replace(OF_THE_WAITING, why="busy", is_stopped=True)
    assert decode_hang(encode_hang(hang, 10.0), 110.0) == replace(hang, since=101.0)


@pytest.mark.parametrize("change", [{"suspects": 3}, {"phase": 99}, {"age_s": None}])
def test_what_is_no_claim_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_hang({**encode_hang(OF_THE_WAITING, 1.0), **change}, 1.0)


def test_nobody_is_given_up_while_the_last_of_all_has_time_left() -> None:
    reports = HangReports()
    reports.add("h1", OF_THE_WAITING)
    assert reports.confirmed_hang(HOST_OF, PROGRESS_OF, 20.0, 1.0) is None
    assert reports.confirmed_hang(HOST_OF, {1: WAITING}, 20.0, 1.0) is None, "of rank 0 nothing is known"
    reports.add("h0", OF_THE_SLOW)
    assert reports.confirmed_hang(HOST_OF, PROGRESS_OF, 700.0, 1.0) == OF_THE_SLOW
    assert reports.confirmed_hang(HOST_OF, PROGRESS_OF, 700.0, 1.0) is None, "it is told once"


def test_who_waited_is_not_blamed_when_the_last_moves_on_before_its_word_does() -> None:
    reports = HangReports()
    reports.add("h1", OF_THE_WAITING)
    assert reports.confirmed_hang(HOST_OF, PROGRESS_OF, 20.0, 1.0) is None
    ahead = {0: WorkerProgress(6, WorkerPhase.VOTE, 20.1), 1: WAITING}
    assert reports.confirmed_hang(HOST_OF, ahead, 20.1, 1.0) is None
    assert reports.confirmed_hang(HOST_OF, ahead, 21.0, 1.0) is None
    assert reports.confirmed_hang(HOST_OF, ahead, 21.2, 1.0) == OF_THE_WAITING, "but it is when that lasts"


def test_who_is_stopped_is_certain_at_once() -> None:
    reports, stopped = HangReports(), replace(OF_THE_WAITING, is_stopped=True)
    reports.add("h1", stopped)
    assert reports.confirmed_hang(HOST_OF, PROGRESS_OF, 20.0, 1.0) == stopped


def test_the_culprit_alone_is_marked() -> None:
    reports, workers = HangReports(), (WorkerReport(0, step=5), WorkerReport(1, step=6))
    assert reports.mark_hung(workers) == workers
    reports.add("h1", OF_THE_WAITING)
    reports.add("h0", OF_THE_SLOW)
    reports.confirmed_hang(HOST_OF, PROGRESS_OF, 700.0, 1.0)
    reports.confirmed_hang(HOST_OF, PROGRESS_OF, 701.0, 1.0)
    slow, waiting = reports.mark_hung(workers)
    assert (slow.hang_kind, slow.hang_s, waiting.hang_kind) == ("hang", 700.0, "")
    reports.begin()
    assert reports.mark_hung(workers) == workers

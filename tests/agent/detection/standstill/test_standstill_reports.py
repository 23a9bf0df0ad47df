"""A standstill is told once, and the rank that its explanation blames is the one that is lost."""

from __future__ import annotations

from dataclasses import replace

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.detection.standstill.hang_report import HangReport, decode_report, encode_report
from closeranks.agent.detection.standstill.standstill_reports import StandstillReports, explain_failure
from tests.agent.detection.standstill.scenes import WAITING, call, rank

ONE_HOST = {0: "h0", 1: "h0"}
TWO_HOSTS = {0: "h0", 1: "h1"}
HANG = Hang((0, 1), 12, WorkerPhase.COMPUTE, 95.0, 5.0)
WAITS = rank(0, call(6), call(7, state=WAITING), size=2)
HOOK = rank(1, call(6), phase=WorkerPhase.HOOK, place="hooks.py:5 in on_step", size=2)


def reports(*hang_reports: HangReport) -> StandstillReports:
    found = StandstillReports()
    for one in hang_reports:
        found.add(one, 100.0)
    return found


def test_a_report_is_read_as_it_was_written() -> None:
    report = HangReport(replace(HANG, why="busy"), (WAITS, HOOK), is_stall=True)
    assert decode_report(encode_report(report, 100.0), 100.0) == report


def test_a_stall_is_told_once_and_blames_nobody_for_good() -> None:
    found = reports(HangReport(HANG, (WAITS, HOOK), is_stall=True))
    event = found.stall_to_tell(ONE_HOST, 3, 100.0)
    assert event is not None
    assert (event.generation, event.step, event.seconds, event.rank, event.host) == (3, 12, 5.0, 1, "h0")
    assert event.kind == "user_code"
    found.add(HangReport(HANG, (WAITS, HOOK), is_stall=True), 101.0)
    assert found.stall_to_tell(ONE_HOST, 3, 102.0) is None
    hang, event = found.explain_hang(HANG, ONE_HOST, 3, 110.0)
    assert event is None, "it was told"
    assert hang.suspects == (1,)
    found.begin()
    assert found.stall_to_tell(ONE_HOST, 4, 120.0) is None


def test_other_hosts_have_time_to_report_what_they_see() -> None:
    found = reports(HangReport(HANG, (WAITS,), is_stall=True))
    assert found.stall_to_tell(TWO_HOSTS, 0, 100.1) is None
    found.add(HangReport(HANG, (HOOK,), is_stall=True), 100.2)
    event = found.stall_to_tell(TWO_HOSTS, 0, 101.0)
    assert event is not None
    assert (event.rank, event.host) == (1, "h1")


def test_without_the_other_host_its_rank_is_said_to_be_unknown() -> None:
    event = reports(HangReport(HANG, (WAITS,), is_stall=True)).stall_to_tell(TWO_HOSTS, 0, 101.0)
    assert event is not None
    assert (event.rank, event.kind) == (-1, "unknown")


def test_a_declared_hang_is_blamed_on_the_rank_that_holds_up_the_others() -> None:
    hang, event = reports(HangReport(HANG, (WAITS, HOOK))).explain_hang(HANG, ONE_HOST, 0, 100.0)
    assert event is not None
    assert (hang.suspects, hang.phase, hang.why) == ((1,), WorkerPhase.HOOK, event.cause)
    kernel = replace(HANG, suspects=(1,), why="asleep, and not in a collective")
    hang, _ = reports(HangReport(kernel, (WAITS, HOOK))).explain_hang(kernel, ONE_HOST, 0, 100.0)
    assert hang == kernel, "what is known is kept"
    stopped = replace(HANG, suspects=(0,), is_stopped=True)
    assert reports(HangReport(stopped, (WAITS, HOOK))).explain_hang(stopped, ONE_HOST, 0, 100.0)[0] == stopped
    assert reports().explain_hang(HANG, ONE_HOST, 0, 100.0) == (HANG, None)


def test_ranks_that_failed_are_explained_only_by_a_mismatch() -> None:
    assert explain_failure((WAITS, HOOK), ONE_HOST, 0) is None
    event = explain_failure((WAITS, rank(1, call(6), call(7, shape=(9,)), size=2)), TWO_HOSTS, 2)
    assert event is not None
    assert (event.kind, event.seconds, event.generation) == ("shape", 0.0, 2)

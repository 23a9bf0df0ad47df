"""Whoever waits for hosts is told for whom, when that changes and now and then."""

from closeranks.agent.job.host_table import NOTICE_INTERVAL_S, HostWaitNotice


def test_it_is_told_at_once_and_again_when_somebody_came_or_time_has_passed() -> None:
    notice = HostWaitNotice(3, "closeranks agent --join a:1")
    text, again = notice.check([], 100.0)
    assert text == "Waiting for 3 more hosts (3 in all). Run on each: closeranks agent --join a:1"
    assert again == 100.0 + NOTICE_INTERVAL_S
    assert notice.check([], 101.0) == ("", again)
    text, again = notice.check(["h0", "h1"], 102.0)
    assert text.startswith("Waiting for another host (3 in all; joined: h0, h1). ")
    assert notice.check(["h0", "h1"], 102.0 + NOTICE_INTERVAL_S)[0] == text


def test_with_enough_nothing_is_said() -> None:
    assert HostWaitNotice(1, "").check(["h0"], 0.0) == ("", None)
    assert HostWaitNotice(1, "").check(["h0", "h1"], 0.0) == ("", None)

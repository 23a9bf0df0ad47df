"""What a signal asks for, and what counts as a failure then."""

from __future__ import annotations

import signal

from closeranks.agent.job.shutdown import ShutdownRequest, counts_as_failure, shutdown_on_signal


def hear(stop: ShutdownRequest | None, number: int, now: float) -> ShutdownRequest:
    return shutdown_on_signal(stop, number, now, grace_s=30.0, interrupt_s=1.5)


def test_sigterm_drains_and_is_heard_once() -> None:
    stop = hear(None, signal.SIGTERM, 10.0)
    assert stop == ShutdownRequest("drained", 10.0, 40.0)
    assert hear(stop, signal.SIGTERM, 20.0) == stop


def test_sighup_drains_as_sigterm_does_under_another_name() -> None:
    stop = hear(None, signal.SIGHUP, 10.0)
    assert stop == ShutdownRequest("disconnected", 10.0, 40.0)
    assert hear(stop, signal.SIGTERM, 20.0) == stop
    assert hear(stop, signal.SIGINT, 12.0) == ShutdownRequest("interrupted", 10.0, 13.5)
    assert counts_as_failure(12.0, stop)


def test_ctrl_c_hurries_and_a_second_one_ends_it() -> None:
    stop = hear(None, signal.SIGINT, 10.0)
    assert stop == ShutdownRequest("interrupted", 10.0, 11.5)
    assert hear(stop, signal.SIGINT, 10.2) == ShutdownRequest("interrupted", 10.0, 10.2)
    assert hear(stop, signal.SIGTERM, 10.2) == stop


def test_ctrl_c_during_a_drain_shortens_it_and_never_lengthens_it() -> None:
    drain = hear(None, signal.SIGTERM, 10.0)
    assert hear(drain, signal.SIGINT, 12.0) == ShutdownRequest("interrupted", 10.0, 13.5)
    assert hear(drain, signal.SIGINT, 39.5) == ShutdownRequest("interrupted", 10.0, 40.0)


def test_what_counts_as_a_failure() -> None:
    interrupted = ShutdownRequest("interrupted", 5.0, 6.5)
    assert not counts_as_failure(None, None)
    assert counts_as_failure(1.0, None)
    assert counts_as_failure(7.0, ShutdownRequest("drained", 5.0, 35.0))
    assert counts_as_failure(4.9, interrupted)
    assert not counts_as_failure(5.1, interrupted)

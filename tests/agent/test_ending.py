"""The moves of an ending, over made-up situations."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.ending import REAP_S, TELL_S, Move, Situation, Stop, counts_as_failure, next_move, on_signal


def hear(stop: Stop | None, number: int, now: float) -> Stop:
    return on_signal(stop, number, now, grace_s=30.0, interrupt_s=1.5)


def test_sigterm_drains_and_is_heard_once() -> None:
    stop = hear(None, signal.SIGTERM, 10.0)
    assert stop == Stop("drained", 10.0, 40.0)
    assert hear(stop, signal.SIGTERM, 20.0) == stop


def test_ctrl_c_hurries_and_a_second_one_ends_it() -> None:
    stop = hear(None, signal.SIGINT, 10.0)
    assert stop == Stop("interrupted", 10.0, 11.5)
    assert hear(stop, signal.SIGINT, 10.2) == Stop("interrupted", 10.0, 10.2)
    assert hear(stop, signal.SIGTERM, 10.2) == stop


def test_ctrl_c_during_a_drain_shortens_it_and_never_lengthens_it() -> None:
    drain = hear(None, signal.SIGTERM, 10.0)
    assert hear(drain, signal.SIGINT, 12.0) == Stop("interrupted", 10.0, 13.5)
    assert hear(drain, signal.SIGINT, 39.5) == Stop("interrupted", 10.0, 40.0)


@pytest.mark.parametrize(
    ("situation", "move"),
    [
        (Situation(5.0, num_left=0), Move("end")),
        (Situation(5.0, num_left=2), Move("wait")),
        (Situation(5.0, num_left=2, failed_at=4.5), Move("wait", 4.5 + TELL_S)),
        (Situation(5.5, num_left=2, failed_at=4.5), Move("fence")),
        (Situation(4.6, num_left=2, failed_at=4.5, all_spoken=True), Move("fence")),
        (Situation(4.6, num_left=0, failed_at=4.5, all_spoken=True), Move("end")),
        (Situation(5.0, num_left=2, stop=Stop("drained", 4.0, 9.0)), Move("wait", 9.0)),
        (Situation(9.0, num_left=2, stop=Stop("drained", 4.0, 9.0)), Move("fence")),
        (Situation(5.0, num_left=2, failed_at=4.5, stop=Stop("drained", 4.0, 5.2)), Move("wait", 5.2)),
        (Situation(5.0, num_left=1, failed_at=1.0, fenced_at=4.9), Move("wait", 4.9 + REAP_S)),
        (Situation(20.0, num_left=1, failed_at=1.0, fenced_at=4.9), Move("end")),
    ],
)
def test_moves(situation: Situation, move: Move) -> None:
    assert next_move(situation) == move


@given(
    st.builds(
        Situation,
        now=st.floats(0, 100),
        num_left=st.integers(0, 8),
        failed_at=st.none() | st.floats(0, 100),
        all_spoken=st.booleans(),
        stop=st.none() | st.builds(Stop, st.sampled_from(["drained", "interrupted"]), st.just(0.0), st.floats(0, 100)),
        fenced_at=st.none() | st.floats(0, 100),
    )
)
def test_a_wait_lies_ahead_and_only_a_healthy_run_waits_without_end(situation: Situation) -> None:
    move = next_move(situation)
    if move.until is not None:
        assert move.until > situation.now
    is_healthy = situation.failed_at is None and situation.stop is None and situation.fenced_at is None
    assert (move == Move("wait")) == (is_healthy and situation.num_left > 0)


def test_what_counts_as_a_failure() -> None:
    interrupted = Stop("interrupted", 5.0, 6.5)
    assert not counts_as_failure(None, None)
    assert counts_as_failure(1.0, None)
    assert counts_as_failure(7.0, Stop("drained", 5.0, 35.0))
    assert counts_as_failure(4.9, interrupted)
    assert not counts_as_failure(5.1, interrupted)

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from closeranks.data import timing
from closeranks.data.timing import StageTimes, measure, stage


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def fail(self, seconds: float) -> None:
        self.spend(seconds)
        raise ValueError("torn")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


def test_each_second_counts_once_under_the_innermost_name(clock: Clock) -> None:
    with measure() as times:
        clock.spend(1)
        with stage("fetch"):
            clock.spend(2)
            with stage("decode"):
                clock.spend(4)
            clock.spend(8)
        with stage("collate"):
            clock.spend(16)
        clock.spend(32)
    assert times == StageTimes(read_s=33, fetch_s=10, decode_s=4, collate_s=16)


def test_a_stage_inside_itself(clock: Clock) -> None:
    with measure() as times, stage("decode"), stage("decode"):
        clock.spend(1)
    assert times == StageTimes(decode_s=1)


def test_an_error_leaves_its_stage(clock: Clock) -> None:
    with measure() as times:
        with pytest.raises(ValueError, match="torn"), stage("decode"):
            clock.fail(1)
        clock.spend(2)
    assert times == StageTimes(read_s=2, decode_s=1)


def test_an_error_ends_the_measure(clock: Clock) -> None:
    with pytest.raises(ValueError, match="torn"), measure() as times, stage("decode"):
        clock.fail(1)
    assert times == StageTimes(decode_s=1)
    with measure() as times:
        clock.spend(2)
    assert times == StageTimes(read_s=2)


def test_where_nobody_measures_a_stage_does_nothing(clock: Clock) -> None:
    with stage("decode"):
        clock.spend(1)
        with measure() as times:
            clock.spend(2)
    assert times == StageTimes(read_s=2)


def test_a_measure_inside_another_counts_in_both(clock: Clock) -> None:
    with measure() as outer, stage("decode"):
        clock.spend(1)
        with measure() as inner:
            clock.spend(2)
            with stage("collate"):
                clock.spend(4)
        clock.spend(8)
    assert inner == StageTimes(read_s=2, collate_s=4)
    assert outer == StageTimes(read_s=2, decode_s=9, collate_s=4)


def test_threads_have_clocks_of_their_own(clock: Clock) -> None:
    def other() -> None:
        with stage("decode"):
            clock.spend(1)

    with measure() as times:
        thread = threading.Thread(target=other)
        thread.start()
        with stage("fetch"):
            thread.join()
    assert times.decode_s == 0
    assert times.read_s + times.fetch_s == 1


def test_times_add_up() -> None:
    assert StageTimes(1, 2, 3, 4) + StageTimes(10, 20, 30, 40) == StageTimes(11, 22, 33, 44)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="no stage 'unpack', only read, fetch, decode, collate"):
        stage("unpack")


def test_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, closeranks.data.timing; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

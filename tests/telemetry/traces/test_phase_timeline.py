from collections.abc import Iterator

import pytest

from closeranks.core.phases import install_clock, installed_clock, phase, switch
from closeranks.telemetry.phase_clock import HostPhaseClock
from closeranks.telemetry.traces.phase_timeline import PhaseTimeline


@pytest.fixture
def clock() -> Iterator[HostPhaseClock]:
    clock = HostPhaseClock()
    install_clock(clock)
    yield clock
    install_clock(None)


def test_phases_are_noted_and_measured_as_before(clock: HostPhaseClock) -> None:
    now = iter(range(100))
    switch("data")
    clock.end_step(0)
    list(clock.pop())
    timeline = PhaseTimeline(lambda: next(now))
    timeline.begin_step(1)
    switch("forward")
    with phase("data.all_reduce"):
        pass
    timeline.begin_step(2)
    timeline.end()
    assert installed_clock() is clock
    switch("vote")
    assert [name for _, name in timeline.phases] == ["data", "forward", "data.all_reduce", "forward"]
    assert timeline.steps == [(1, 0, 4), (2, 4, 5)]
    assert [at for at, _ in timeline.phases] == [0, 1, 2, 3]
    clock.end_step(1)
    (measured,) = clock.pop()
    assert {"data", "forward", "data.all_reduce", "vote"} <= set(measured.phases)


def test_a_clock_that_was_taken_away_is_not_put_back(clock: HostPhaseClock) -> None:
    timeline = PhaseTimeline()
    timeline.begin_step(1)
    install_clock(None)
    timeline.end()
    assert installed_clock() is None

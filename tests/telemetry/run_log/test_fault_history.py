import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.events import Event, HostChanged, RankLost, RanksClosed, SlowRank, Standstill, StepDone
from closeranks.telemetry.run_log.fault_history import FaultHistory, RunFault, TimedEvent, fault_history


def folded(*events: Event) -> FaultHistory:
    return fault_history(TimedEvent(float(at), event) for at, event in enumerate(events))


def lost(generation: int, detected_s: float = 0.0) -> RankLost:
    return RankLost(generation, 1, "", 40, "killed", "killed by SIGKILL", detected_s)


def test_a_fault_is_closed_by_the_first_good_step() -> None:
    (fault,) = folded(lost(0), RanksClosed(1, 40, 0.9, 1)).faults
    assert fault.closed is not None
    assert not fault.is_followed
    assert fault.generation == 1


def test_two_ranks_lost_before_ranks_were_closed_are_closed_once() -> None:
    troubles = folded(lost(0, 0.5), lost(1, 0.25), RanksClosed(2, 40, 1.5, 2))
    assert [fault.is_followed for fault in troubles.faults] == [True, False]
    assert troubles.num_redone == 2
    assert troubles.lost_s(0.1) == pytest.approx(0.5 + 0.25 + 1.5 + 0.1)


def test_a_run_that_ended_in_a_fault_is_not_closed_by_its_next_launch() -> None:
    troubles = folded(lost(0), lost(0), RanksClosed(1, 12, 0.9, 0))
    assert [fault.closed is None for fault in troubles.faults] == [True, False]


def test_what_is_not_closed_costs_what_it_took_to_notice() -> None:
    assert folded(lost(3, 5.0)).lost_s(0.1) == 5.0
    assert RunFault(0.0, lost(3)).generation == 4


@pytest.mark.parametrize(("num_redone", "seconds"), [(0, 0.6), (1, 1.0), (5, 2.6)])
def test_steps_that_were_finished_before_are_lost_and_the_one_under_way_is_not(num_redone: int, seconds: float) -> None:
    """A first good step of 0.4 s is in the 1.0 s either way; it is a loss only if it had been made before."""
    troubles = folded(lost(0), RanksClosed(1, 40, 1.0, num_redone))
    assert troubles.lost_s(0.4) == pytest.approx(seconds)


def test_slow_ranks_and_hosts_stand_beside_the_faults() -> None:
    troubles = folded(SlowRank(2), StepDone(3), Standstill(step=4), HostChanged("b", "joined"), lost(0))
    assert [type(told.event) for told in troubles.others] == [SlowRank, Standstill, HostChanged]
    assert len(troubles.faults) == 1


@given(st.lists(st.sampled_from("lc"), max_size=12))
def test_every_fault_is_told_once_and_in_order(script: list[str]) -> None:
    generation, events = 0, []
    for sign in script:
        if sign == "l":
            events.append(lost(generation))
            generation += 1
        else:
            events.append(RanksClosed(generation, 40, 1.0, 1))
    troubles = folded(*events)
    assert [fault.lost.generation for fault in troubles.faults] == list(range(script.count("l")))
    num_closings = "".join(script).replace("c", "c ").split()
    assert troubles.num_redone == sum("l" in part and "c" in part for part in num_closings)

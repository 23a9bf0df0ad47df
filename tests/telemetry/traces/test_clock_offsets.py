"""Clocks of several hosts become one, within a bound that holds whatever the network did."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.telemetry.traces.clock_offsets import ClockOffset, clock_offsets

NS = st.integers(0, 50_000_000)
SKEW = st.integers(-(10**12), 10**12)


@given(st.lists(st.tuples(NS, NS, NS, NS), min_size=1, max_size=8), SKEW)
def test_the_true_offset_is_within_the_bound(meetings: list[tuple[int, int, int, int]], skew: int) -> None:
    mine, theirs = [], []
    at = 10**15
    for my_delay, their_delay, my_leave, their_leave in meetings:
        begun = at + max(my_delay, their_delay)  # nobody leaves before both have entered
        mine.append((at + my_delay, begun + my_leave))
        theirs.append((at + their_delay + skew, begun + their_leave + skew))
        at = begun + max(my_leave, their_leave)
    found = clock_offsets({0: "a", 3: "b"}, {0: mine, 3: theirs})
    assert found[0] == ClockOffset(0, 0)
    assert found[3].error_ns is not None
    assert abs(found[3].offset_ns - skew) <= found[3].error_ns + 1


def test_quick_meetings_give_a_tight_bound() -> None:
    instants = [(at, at + 200_000) for at in range(0, 8_000_000, 10**6)]
    far = [(enter + 10**9, leave + 10**9) for enter, leave in instants]
    assert clock_offsets({0: "a", 1: "b"}, {0: instants, 1: far})[1] == ClockOffset(10**9, 200_000)


def test_ranks_of_one_machine_need_no_meeting_and_share_what_is_known_of_another() -> None:
    near, late, far = [(0, 100)], [(60, 100)], [(1050, 1120)]
    found = clock_offsets({0: "a", 1: "a", 2: "b", 3: "b"}, {0: near, 1: late, 2: far})
    assert found[0] == found[1] == ClockOffset(0, 0)
    assert found[2] == found[3] == ClockOffset(1005, 55), "the one that came late bounds it from one side"


def test_a_clock_that_nothing_is_known_of_is_said_to_be_unknown() -> None:
    assert clock_offsets({0: "a", 1: "b"}, {})[1] == ClockOffset(0, None)

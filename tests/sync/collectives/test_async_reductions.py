"""Collectives start in an order that follows from how reductions began, and all arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.sync.collectives.async_reductions import AsyncReduction, InFlightReductions, run_reduction


class Collective:
    """Stands for a collective: it notes when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def reduction(log: list[str], name: str, num_collectives: int) -> AsyncReduction:
    for number in range(num_collectives):
        log.append(f"start {name}{number}")
        yield Collective(log, f"{name}{number}")  # type: ignore[misc]
    log.append(f"arrive {name}")


def test_a_bucket_that_leaves_moves_those_before_it_by_one_leg() -> None:
    log: list[str] = []
    in_flight = InFlightReductions()
    for name in "abc":
        in_flight.add(reduction(log, name, 2), 2)
    assert log == ["start a0", "start b0", "wait a0", "start a1", "start c0", "wait b0", "start b1"]
    in_flight.wait_all()
    assert log[7:] == ["wait a1", "arrive a", "wait b1", "arrive b", "wait c0", "start c1", "wait c1", "arrive c"]


def test_nobody_waits_for_the_last_leg_of_another() -> None:
    log: list[str] = []
    in_flight = InFlightReductions()
    for name in "abc":
        in_flight.add(reduction(log, name, 1), 1)
    assert log == ["start a0", "start b0", "start c0"]


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 3))
def test_all_arrive_and_the_oldest_first_when_it_is_shortened(counts: list[int], left: int) -> None:
    log: list[str] = []
    in_flight = InFlightReductions()
    for number, num_collectives in enumerate(counts):
        in_flight.add(reduction(log, f"j{number}.", num_collectives), max(1, num_collectives))
        in_flight.wait_until(left)
        assert len(in_flight) <= left
    in_flight.wait_all()
    assert len(in_flight) == 0
    assert sorted(line for line in log if line.startswith("arrive")) == sorted(
        f"arrive j{number}." for number in range(len(counts))
    )
    starts = [line.split()[1] for line in log if line.startswith("start")]
    assert len(starts) == sum(counts)
    assert sorted(line.split()[1] for line in log if line.startswith("wait")) == sorted(starts)


def test_the_whole_way_at_once() -> None:
    log: list[str] = []
    run_reduction(reduction(log, "a", 2))
    assert log == ["start a0", "wait a0", "start a1", "wait a1", "arrive a"]

"""Workers on hosts, as laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.placement import (
    HostPlacement,
    HostState,
    place_workers,
    quarantined_hosts,
    total_capacity,
    why_quarantined,
)
from tests.agent.faults import fault

LEAD, B, C = HostState("lead", 2, is_leader=True), HostState("b", 2), HostState("c", 2)
hosts_of_a_job = st.lists(
    st.builds(
        HostState,
        name=st.just(""),
        num_workers=st.integers(0, 4),
        state=st.sampled_from(["ready", "ready", "leaving", "lost"]),
    ),
    min_size=1,
    max_size=5,
).flatmap(lambda hosts: st.integers(0, len(hosts) - 1).map(lambda lead: _named(hosts, lead)))


def _named(hosts: list[HostState], lead: int) -> list[HostState]:
    return [HostState(f"h{number}", host.num_workers, number == lead, host.state) for number, host in enumerate(hosts)]


@given(hosts_of_a_job, st.integers(0, 20), st.frozensets(st.sampled_from(["h0", "h1", "h2", "h3", "h4"])))
def test_laws_of_allotment(hosts: list[HostState], wanted: int, avoided: frozenset[str]) -> None:
    num_workers = min(wanted, total_capacity(hosts))
    places = place_workers(hosts, num_workers, avoided)
    taken = {one.host: one.num_workers for one in places}
    by_name = {host.name: host for host in hosts}
    assert sum(taken.values()) == num_workers
    assert len(taken) == len(places), "a host's ranks are consecutive"
    assert all(0 < count <= by_name[name].num_workers for name, count in taken.items())
    assert all(by_name[name].state == "ready" for name in taken)
    if taken.keys() & avoided:
        good = [host for host in hosts if host.state == "ready" and host.name not in avoided]
        assert all(taken.get(host.name, 0) == host.num_workers for host in good), "the others are full"
    leads = [place for place, one in enumerate(places) if by_name[one.host].is_leader]
    assert leads in ([], [0])
    assert [one.host for one in places if not by_name[one.host].is_leader] == sorted(
        one.host for one in places if not by_name[one.host].is_leader
    ), "the others as they joined"


def test_a_spare_host_takes_the_place_of_one_that_is_lost() -> None:
    assert place_workers([LEAD, B, C], 4) == (HostPlacement("lead", 2), HostPlacement("b", 2))
    assert place_workers([LEAD, HostState("b", 2, state="lost"), C], 4) == (
        HostPlacement("lead", 2),
        HostPlacement("c", 2),
    )


def test_a_host_in_quarantine_keeps_its_place_in_the_order_of_ranks() -> None:
    """It is there for want of room alone; what lies in the memory of the others stays with them."""
    assert place_workers([LEAD, B, C], 6, frozenset({"b"})) == (
        HostPlacement("lead", 2),
        HostPlacement("b", 2),
        HostPlacement("c", 2),
    )
    assert place_workers([LEAD, B, C], 5, frozenset({"b"})) == (
        HostPlacement("lead", 2),
        HostPlacement("b", 1),
        HostPlacement("c", 2),
    )
    assert place_workers([LEAD, B, C], 4, frozenset({"b"})) == (HostPlacement("lead", 2), HostPlacement("c", 2))


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 1 of 3"):
        place_workers([B], 3)


def test_quarantine_counts_a_hosts_own_faults_in_the_window() -> None:
    limits = FaultLimits(max_host_faults=2, fault_window_s=10.0)
    faults = [fault(at=1.0, host="b"), fault(at=5.0, host="c"), fault(at=6.0, host="b")]
    assert quarantined_hosts([LEAD, B, C], faults, limits, 6.0) == {"b"}
    assert quarantined_hosts([LEAD, B, C], faults, limits, 11.0) == set(), "its first is forgotten"
    assert why_quarantined("b", faults, limits, 6.0) == "2 faults (2 killed) within 0.167 min"


def test_the_leads_host_is_never_left() -> None:
    faults = [fault(host="lead") for _ in range(9)]
    assert quarantined_hosts([LEAD, B], faults, FaultLimits(), 0.0) == set()

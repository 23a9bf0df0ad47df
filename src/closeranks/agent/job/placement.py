"""Placement: how many workers each host gets.

Ranks follow the order of the hosts, so that a host keeps its ranks, and with them the state in its memory, wherever
that is possible: the leader's host first, the others in the order in which they joined. Invariants: no host gets more
workers than its capacity; a quarantined host gets none while another has capacity; more capacity never means fewer
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.fault_log import FaultRecord, faults_within, summarize_faults


@dataclass(frozen=True, slots=True)
class HostState:
    """One host of the job, as the leader knows it."""

    name: str
    num_workers: int
    """Its capacity."""
    is_leader: bool = False
    state: Literal["ready", "leaving", "lost"] = "ready"
    since: float = 0.0
    """When it entered this state, by the leader's ``time.monotonic()``."""


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """A number of consecutive ranks on one host."""

    host: str
    num_workers: int


def quarantined_hosts(
    hosts: Sequence[HostState], faults: Sequence[FaultRecord], limits: FaultLimits, now: float
) -> frozenset[str]:
    """Hosts with too many recent faults. Never the leader's host: the job cannot run without it anyway."""
    counted = [fault.host for fault in faults_within(faults, limits.fault_window_s, now)]
    return frozenset(
        host.name for host in hosts if not host.is_leader and counted.count(host.name) >= limits.max_host_faults
    )


def why_quarantined(host: str, faults: Sequence[FaultRecord], limits: FaultLimits, now: float) -> str:
    """For people: ``5 faults (4 killed, 1 hang) within 60 min``."""
    own = [fault for fault in faults_within(faults, limits.fault_window_s, now) if fault.host == host]
    return f"{len(own)} faults ({summarize_faults(own)}) within {limits.fault_window_s / 60:.3g} min"


def hosts_by_rank(placements: Sequence[HostPlacement]) -> dict[int, str]:
    names = [one.host for one in placements for _ in range(one.num_workers)]
    return dict(enumerate(names))


def total_capacity(hosts: Sequence[HostState]) -> int:
    """How many workers could be started now."""
    return sum(host.num_workers for host in hosts if host.state == "ready")


def place_workers(
    hosts: Sequence[HostState], num_workers: int, avoided: frozenset[str] = frozenset()
) -> tuple[HostPlacement, ...]:
    """Place ``num_workers`` on these hosts, which must have the capacity; hosts in ``avoided`` are filled last."""
    ready = [host for host in hosts if host.state == "ready"]
    preferred = sorted(ready, key=lambda host: (host.name in avoided, not host.is_leader))
    taken: dict[str, int] = {}
    left = num_workers
    for host in preferred:
        taken[host.name] = min(host.num_workers, left)
        left -= taken[host.name]
    if left:
        raise ValueError(f"there is no room for {left} of {num_workers} workers")
    ranked = sorted(ready, key=lambda host: not host.is_leader)
    return tuple(HostPlacement(host.name, taken[host.name]) for host in ranked if taken[host.name])

"""Heartbeat interval, lease duration, and how much later the leader may count a host as dead.

    follower   |-- sent a heartbeat -------- lease_s ------------>| kills its workers, at the latest now
    leader        |-- received it ---------- lease_s + margin_s ----------------->| counts them as dead

Invariant: whatever the network does, and with clock rates off by at most ``DRIFT``, the workers of a host are dead
before the leader counts its lease as expired.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 0.01
"""How far the rate of a host's monotonic clock may be from true time; real ones are a hundred times better."""
KILL_S = 0.5
"""How long a host may take from the moment it must kill its workers until they are dead."""
ORPHAN_S = 0.1
"""How long the workers of a dead agent may outlive it; the kernel kills them."""
MAX_BEATS_PER_S = 2000
"""How many heartbeats the leader handles in a second; with more hosts than this allows, each sends less often."""
MIN_BEATS_PER_LEASE = 4
"""The fewest heartbeats in a lease, which survives the loss of all but the last of them."""
_BEAT_S, _LEASE_S = 0.25, 3.0
"""For a fleet small enough to stay below ``MAX_BEATS_PER_S`` with them."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Heartbeat and lease times of a fleet, which the leader sends to each host with every acknowledgement."""

    beat_s: float
    lease_s: float
    margin_s: float

    @property
    def dead_after_s(self) -> float:
        """After this long without a heartbeat the leader counts a host's workers as dead."""
        return self.lease_s + self.margin_s


def lease_timing_for(num_hosts: int) -> LeaseTiming:
    """The same times for every host, slower in a large fleet: 10,000 hosts send a heartbeat every 5 s and hold leases
    of 20 s."""
    slowed_s = max(_BEAT_S, num_hosts / MAX_BEATS_PER_S)
    held_s = max(_LEASE_S, MIN_BEATS_PER_LEASE * slowed_s)
    return LeaseTiming(slowed_s, held_s, lease_margin_s(held_s))


def lease_margin_s(lease_s: float) -> float:
    """Covers a slow clock of the follower, a fast one of the leader, and the time that killing takes."""
    return lease_s * 2 * DRIFT / (1 - DRIFT) + KILL_S * (1 + DRIFT)

"""How often does a host speak, for how long does its lease hold, and how much later may the lead call it dead?

    follower   |-- sent a beat ------------- lease_s ------------>| kills its workers, at the latest now
    lead          |-- received it ---------- lease_s + margin_s ----------------->| counts them as dead

Invariant: whatever the network does, and with clocks that run apart by at most ``DRIFT``, the workers of a host are
dead before the lead counts its lease as expired.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 0.01
"""How far the rate of a host's monotonic clock may be from true time; real ones are a hundred times better."""
KILL_S = 0.5
"""How long a host may take from the moment it must kill its workers until they are dead."""
ORPHAN_S = 0.1
"""How long the workers of an agent that died may live on; the kernel kills them for it."""
MAX_BEATS_PER_S = 2000
"""What the lead takes in a second; with more hosts than this allows, each speaks less often."""
BEATS_PER_LEASE = 4
"""A lease outlives the loss of all beats but the last of so many."""
_BEAT_S, _LEASE_S = 0.25, 3.0
"""Of a fleet in which that is slow enough."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The rhythm of a fleet: what the lead tells each host with every answer."""

    beat_s: float
    lease_s: float
    margin_s: float

    @property
    def patience_s(self) -> float:
        """After so long without a beat the lead counts a host's workers as dead."""
        return self.lease_s + self.margin_s


def pace_for(num_hosts: int) -> Pace:
    """The same rhythm for everybody, slower in a large fleet: 10,000 hosts speak every 5 s and hold leases of 20 s."""
    slowed_s = max(_BEAT_S, num_hosts / MAX_BEATS_PER_S)
    held_s = max(_LEASE_S, BEATS_PER_LEASE * slowed_s)
    return Pace(slowed_s, held_s, margin_for(held_s))


def margin_for(lease_s: float) -> float:
    """The follower's clock may run slow, the lead's fast, and killing takes time."""
    return lease_s * 2 * DRIFT / (1 - DRIFT) + KILL_S * (1 + DRIFT)

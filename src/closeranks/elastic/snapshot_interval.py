"""Decides how many steps lie between two snapshots.

Invariant: pure functions of numbers that all ranks share, so that all ranks take their snapshots at the same steps.
"""

from __future__ import annotations

import math

_FIRST, _AGAIN, _EVERY = (3, 6), 25, 100
_MOST = 1000


def should_remeasure(num_steps: int, *, has_decided: bool = False) -> bool:
    """Whether ranks evaluate the cost of snapshots after this many steps or synchronisations: early, as soon as enough
    snapshots were taken, again when steps without a snapshot have been measured, and then at regular intervals."""
    is_first = num_steps in _FIRST and not has_decided
    return is_first or num_steps == _AGAIN or (num_steps > 0 and num_steps % _EVERY == 0)


def steps_between(stall_s: float, late_s: float, step_s: float, share: float, send_s: float = 0.0) -> int:
    """The smallest number of steps between snapshots at which a snapshot costs at most ``share`` of the time of those
    steps. The cost is ``late_s`` for a snapshot after every step, since the next one waits until it is sealed, and
    ``stall_s`` for less frequent ones.

    ``send_s``: how long the device-to-host copy of the state takes. The next update on the device waits for it, even if
    the host did not have to wait. If it is a large part of a step, snapshots after every step would hide how long a
    step takes without one."""
    if step_s <= 0.0 or (late_s <= share * step_s and send_s <= step_s / 2):
        return 1
    return min(max(2, math.ceil(max(stall_s, send_s - step_s) / (share * step_s))), _MOST)


def snapshot_cost_s(stall_s: float, busy_s: float, num_cores: int, num_busy: int) -> float:
    """What a snapshot costs training: the time training was blocked and, if there is no spare core for the copying
    thread of every worker, also its CPU time, which other threads would have used."""
    return stall_s if num_cores >= 2 * num_busy else stall_s + busy_s

"""After how many steps is the next copy of the state taken?

Invariant: pure functions of numbers that all ranks share, so that all take their copies at the same steps.
"""

from __future__ import annotations

import math

_FIRST, _AGAIN, _EVERY = (3, 6), 25, 100
_MOST = 1000


def is_time_to_decide(num_steps: int, *, has_decided: bool = False) -> bool:
    """Whether ranks look at what copies cost after so many steps of their own: early, as soon as enough copies were
    taken (fewer are by the first time where a generation found its state in place), again when steps without a copy
    have been seen, and now and then."""
    is_first = num_steps in _FIRST and not has_decided
    return is_first or num_steps == _AGAIN or (num_steps > 0 and num_steps % _EVERY == 0)


def steps_between(stall_s: float, late_s: float, step_s: float, share: float, send_s: float = 0.0) -> int:
    """As few as keep what training loses by a copy within this share of the time for so many steps: ``late_s`` with
    one after every step, which waits until it is sealed, ``stall_s`` with fewer.

    ``send_s``: how long a device takes to send the state. Its next update waits for that, whether or not the host came
    early enough to wait too. Where that is much of a step, one copy after every step would hide what a step takes
    without."""
    if step_s <= 0.0 or (late_s <= share * step_s and send_s <= step_s / 2):
        return 1
    return min(max(2, math.ceil(max(stall_s, send_s - step_s) / (share * step_s))), _MOST)


def true_cost(stall_s: float, busy_s: float, num_cores: int, num_busy: int) -> float:
    """What a copy takes from training: the time it stood still and, where no core is to spare for the copying thread of
    every worker, the processor time too, which somebody else would have used."""
    return stall_s if num_cores >= 2 * num_busy else stall_s + busy_s

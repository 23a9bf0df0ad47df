"""After how many steps is the next copy of the state taken?

Invariant: pure functions of numbers that all ranks share, so that all take their copies at the same steps.
"""

from __future__ import annotations

import math

_FIRST, _EVERY = (3, 6), 100
_MOST = 1000


def is_time_to_decide(num_steps: int, *, has_decided: bool = False) -> bool:
    """Whether ranks look at what copies cost after so many steps of their own: early, as soon as enough copies were
    taken (fewer are by the first time where a generation found its state in place), and now and then."""
    return (num_steps in _FIRST and not has_decided) or (num_steps > 0 and num_steps % _EVERY == 0)


def steps_between(stall_s: float, late_s: float, step_s: float, share: float) -> int:
    """As few as keep what training loses by a copy within this share of the time for so many steps: ``late_s`` with
    one after every step, which waits until it is sealed, ``stall_s`` with fewer."""
    if late_s <= share * step_s or step_s <= 0.0:
        return 1
    return min(max(2, math.ceil(stall_s / (share * step_s))), _MOST)


def true_cost(stall_s: float, busy_s: float, num_cores: int, num_busy: int) -> float:
    """What a copy takes from training: the time it stood still and, where no core is to spare for the copying thread of
    every worker, the processor time too, which somebody else would have used."""
    return stall_s if num_cores >= 2 * num_busy else stall_s + busy_s

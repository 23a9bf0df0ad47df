"""Divides the micro-batches of a step among workers of different speed.

Workers wait for each other at the end of a step (with local SGD: at an outer step), so the slowest decides. Giving it
fewer micro-batches lets all finish together. What gets a share is a data rank, or with local SGD a replica of ``width``
data ranks. Pure. Invariants: shares are whole micro-batches that add up to those of a step, and every data rank has at
least one; they change only where that shortens a step by more than a tenth. So they do not change as long as each
measurement is within a twentieth of a speed for which they are the best. Data ranks of about the same speed get about
the same share, so that shares do not follow the noise of one measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

GAIN = 1.1
"""By what factor a step must get shorter: less is within the noise of the measurements."""
_ALIKE = 1.2
"""Times that differ by up to this factor may be of equally fast ranks: each measurement is off by up to a tenth."""


def even_shares(num_micro: int, num_replicas: int, width: int = 1) -> tuple[int, ...]:
    """As ``data.sampling.batch_schedule`` assigns them to ``num_replicas`` of ``width`` data ranks: the first ones take
    more."""
    share, extra = divmod(num_micro, num_replicas * width)
    return tuple(share * width + min(max(extra - width * number, 0), width) for number in range(num_replicas))


def step_seconds(shares: Sequence[int], seconds: Sequence[float], width: int = 1, fill: int = 0) -> float:
    """How long the slowest computes; ``seconds``: each one's time for one micro-batch. ``fill``: micro-batches' worth
    of time in which a pipeline fills and drains."""
    return max((-(-share // width) + fill) * one_s for share, one_s in zip(shares, seconds, strict=True))


def best_shares(num_micro: int, seconds: Sequence[float], width: int = 1, fill: int = 0) -> tuple[int, ...]:
    """Greedy: each micro-batch goes to the one that would finish it first; ties go to the first of them."""
    shares = [width] * len(seconds)
    for _ in range(num_micro - sum(shares)):
        first = min(range(len(shares)), key=lambda number: (-(-(shares[number] + 1) // width) + fill) * seconds[number])
        shares[first] += 1
    return tuple(shares)


def levelled(seconds: Sequence[float]) -> list[float]:
    """The times with those of about the same speed replaced by their mean."""
    found, rest = list(seconds), sorted(range(len(seconds)), key=seconds.__getitem__)
    while rest:
        alike = [number for number in rest if seconds[number] <= _ALIKE * seconds[rest[0]]]
        for number in alike:
            found[number] = mean(seconds[one] for one in alike)
        rest = rest[len(alike) :]
    return found


def rebalanced(shares: tuple[int, ...], seconds: Sequence[float], width: int = 1, fill: int = 0) -> tuple[int, ...]:
    """The shares from now on: the current ones, unless others are better by more than ``GAIN``."""
    num_micro = sum(shares)
    if min(seconds) <= 0.0 or num_micro < len(shares) * width:  # one was not measured, or there is nothing to move
        return shares

    def step_s(candidate: Sequence[int]) -> float:
        return step_seconds(candidate, seconds, width, fill)

    best = best_shares(num_micro, seconds, width, fill)
    calm = best_shares(num_micro, levelled(seconds), width, fill)
    if step_s(calm) <= GAIN * step_s(best) and GAIN * step_s(calm) < step_s(shares):
        return calm
    return best if step_s(shares) > GAIN * step_s(best) else shares

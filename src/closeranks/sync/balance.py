"""How many micro-batches of a step does each replica take, where some are slower than others?

Replicas that train apart wait for each other only when they meet; then the slowest decides. Giving it fewer
micro-batches lets all arrive together. Pure. Invariants: shares are whole micro-batches that add up to those of a step,
and every data rank has at least one; they change only where that shortens a step by more than a tenth, so that
measuring alone never moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

GAIN = 1.1
"""By how much a step must get shorter: less is within what measurements vary by."""


def even_shares(num_micro: int, num_replicas: int, width: int) -> tuple[int, ...]:
    """As ``data.schedule`` deals them out to ``num_replicas`` of ``width`` data ranks: the first ones take more."""
    share, extra = divmod(num_micro, num_replicas * width)
    return tuple(share * width + min(max(extra - width * number, 0), width) for number in range(num_replicas))


def step_seconds(shares: Sequence[int], seconds: Sequence[float], width: int) -> float:
    """How long the slowest replica computes; ``seconds``: for one micro-batch, of each replica."""
    return max(-(-share // width) * one_s for share, one_s in zip(shares, seconds, strict=True))


def best_shares(num_micro: int, seconds: Sequence[float], width: int) -> tuple[int, ...]:
    """One by one to whoever would be done with it first; the first of those that would be at the same time."""
    shares = [width] * len(seconds)
    for _ in range(num_micro - sum(shares)):
        first = min(range(len(shares)), key=lambda number: -(-(shares[number] + 1) // width) * seconds[number])
        shares[first] += 1
    return tuple(shares)


def rebalanced(shares: tuple[int, ...], seconds: Sequence[float], width: int) -> tuple[int, ...]:
    """The shares from now on: those there are, unless others are better by more than ``GAIN``."""
    num_micro = sum(shares)
    if min(seconds) <= 0.0 or num_micro < len(shares) * width:  # somebody was not measured, or there is nothing to give
        return shares
    best = best_shares(num_micro, seconds, width)
    is_better = step_seconds(shares, seconds, width) > GAIN * step_seconds(best, seconds, width)
    return best if is_better else shares

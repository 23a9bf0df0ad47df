"""Balances the micro-batches of a step over local SGD replicas of different speed.

Replicas wait for each other only when they synchronize; then the slowest decides. Giving it fewer micro-batches lets
all finish together. Pure. Invariants: shares are whole micro-batches that add up to those of a step, and every data
rank has at least one; they change only where that shortens a step by more than a tenth, so that measurement noise
alone never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

GAIN = 1.1
"""By what factor a step must get shorter: less is within the noise of the measurements."""


def even_shares(num_micro: int, num_replicas: int, width: int) -> tuple[int, ...]:
    """As ``data.sampling.batch_schedule`` assigns them to ``num_replicas`` of ``width`` data ranks: the first ones take
    more."""
    share, extra = divmod(num_micro, num_replicas * width)
    return tuple(share * width + min(max(extra - width * number, 0), width) for number in range(num_replicas))


def step_seconds(shares: Sequence[int], seconds: Sequence[float], width: int) -> float:
    """How long the slowest replica computes; ``seconds``: each replica's time for one micro-batch."""
    return max(-(-share // width) * one_s for share, one_s in zip(shares, seconds, strict=True))


def best_shares(num_micro: int, seconds: Sequence[float], width: int) -> tuple[int, ...]:
    """Greedy: each micro-batch goes to the replica that would finish it first; ties go to the first replica."""
    shares = [width] * len(seconds)
    for _ in range(num_micro - sum(shares)):
        first = min(range(len(shares)), key=lambda number: -(-(shares[number] + 1) // width) * seconds[number])
        shares[first] += 1
    return tuple(shares)


def rebalanced(shares: tuple[int, ...], seconds: Sequence[float], width: int) -> tuple[int, ...]:
    """The shares from now on: the current ones, unless others are better by more than ``GAIN``."""
    num_micro = sum(shares)
    if min(seconds) <= 0.0 or num_micro < len(shares) * width:  # one was not measured, or there is nothing to move
        return shares
    best = best_shares(num_micro, seconds, width)
    is_better = step_seconds(shares, seconds, width) > GAIN * step_seconds(best, seconds, width)
    return best if is_better else shares

"""Draws the faults of a random campaign and the steps at which they are injected.

Pure: the same arguments give the same faults. Invariants: each kind occurs as often as any other (give or take one);
steps are spread over the whole run and include the first, a middle and the last one; no step is used twice, unless a
kind is not possible at the step it was given; a fault with a duration is over before the run is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from closeranks.core.errors import UserError
from closeranks.elastic.faults.fault import KINDS, STEPS, InjectedFault

_LONGEST = 40
"""Duration in steps of a lasting fault in a long run."""
_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""How far into a step; later, another rank may already have finished it."""


def draw_campaign(kinds: Sequence[str], count: int, seed: int, num_steps: int, num_ranks: int) -> list[InjectedFault]:
    """``count`` faults in the order of their steps."""
    names = list(dict.fromkeys(kinds))
    _check(names, count, num_steps, num_ranks)
    rng = random.Random(f"{seed}/{num_steps}/{num_ranks}/{','.join(names)}")
    steps = _steps(count, num_steps, rng)
    kind_order = _shuffled_kinds(names, count, rng)
    _swap_impossible(kind_order, steps, num_steps)
    faults = [_fault(kind, step, num_steps, num_ranks, rng) for kind, step in zip(kind_order, steps, strict=True)]
    return sorted(faults, key=lambda fault: fault.step)


def _check(names: Sequence[str], count: int, num_steps: int, num_ranks: int) -> None:
    if not names or count < 1:
        raise UserError("a campaign needs at least one kind of fault, and a count of at least 1", "Name a kind: kill.")
    if count > num_steps:
        what = f"{count} faults do not fit into {num_steps} steps: each needs a step of its own"
        raise UserError(what, f"Ask for --count {num_steps} at most, or train longer.")
    for name in names:
        needed = max(KINDS[name].first_step, 2 if KINDS[name].must_end else 1)
        if num_steps < needed:
            raise UserError(f"{name} needs a run of at least {needed} steps, this one has {num_steps}", "Train longer.")
        if num_ranks < KINDS[name].num_ranks:
            raise UserError(f"{name} needs at least {KINDS[name].num_ranks} workers", "Start with -n 2 or more.")


def _latest(kind: str, num_steps: int) -> int:
    """The last step it can start at: a lasting fault needs one more step, one that may miss its moment needs the last
    third of the run to retry."""
    kind_info = KINDS[kind]
    if kind_info.may_miss:
        return max(kind_info.first_step, num_steps - num_steps // 3)
    return num_steps if kind_info.ends_generation else max(1, num_steps - 1)


def _steps(count: int, num_steps: int, rng: random.Random) -> list[int]:
    """Evenly spread steps, each shifted randomly by less than half a gap; both ends and the middle are fixed."""
    middle = (num_steps + 1) // 2
    if count == 1:
        return [middle]
    gap = (num_steps - 1) / (count - 1)
    slack = max(0, (int(gap) - 1) // 2)
    inner = [1 + round(place * gap) + rng.randint(-slack, slack) for place in range(1, count - 1)]
    if inner and middle not in inner:
        inner[min(range(len(inner)), key=lambda place: abs(inner[place] - middle))] = middle
    return [1, *inner, num_steps]


def _shuffled_kinds(names: list[str], count: int, rng: random.Random) -> list[str]:
    kind_order: list[str] = []
    while len(kind_order) < count:
        shuffled = list(names)
        rng.shuffle(shuffled)
        kind_order += shuffled
    return kind_order[:count]


def _swap_impossible(kind_order: list[str], steps: Sequence[int], num_steps: int) -> None:
    """Swap a kind that is not possible at its step with one that is, if there is one."""
    for place, step in enumerate(steps):
        if _fits(kind_order[place], step, num_steps):
            continue
        for other in range(len(kind_order)):
            if _fits(kind_order[other], step, num_steps) and _fits(kind_order[place], steps[other], num_steps):
                kind_order[place], kind_order[other] = kind_order[other], kind_order[place]
                break


def _fits(kind: str, step: int, num_steps: int) -> bool:
    return KINDS[kind].first_step <= step <= _latest(kind, num_steps)


def _fault(kind: str, step: int, num_steps: int, num_ranks: int, rng: random.Random) -> InjectedFault:
    kind_info, rank = KINDS[kind], rng.randrange(num_ranks)
    other = rng.choice([one for one in range(num_ranks) if one != rank]) if "other" in kind_info.takes else 0
    at = rng.choice(_FRACTIONS) if step < num_steps else 0.0  # the last step may be shorter than the one before it
    step = min(max(step, kind_info.first_step), _latest(kind, num_steps))
    rank = rank if "rank" in kind_info.takes else 0
    if kind_info.ends_generation:
        return InjectedFault(kind, step, rank, other, at=at)
    # A save takes as long as many short steps, and a worker that is slow for only a second is not reported as slow.
    steps = max(1, min(max(STEPS, min(num_steps // 3, _LONGEST)), num_steps - step))
    return InjectedFault(kind, step, rank, steps=steps, at=at)

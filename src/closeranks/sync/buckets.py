"""Which gradients travel together, and in what order?

The plan is a pure function of the parameters and the caps, never of which gradient happened to be ready first in some
earlier step: a resumed or re-formed run sums in the same order and is bit-identical. (DDP rebuilds its buckets after
the first backward, so a freshly wrapped model sums in another order; from three ranks on the bits differ.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter as the plan sees it."""

    name: str
    numel: int
    dtype: str
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Members that are summed in one collective, laid out one after the other."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str


def plan_buckets(
    members: Sequence[Member], *, num_ranks: int, cap_bytes: int, first_cap_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets in the order they leave: last parameters first, as backward produces them.

    A group of one has nothing to sum, so its plan is empty. A parameter larger than the cap gets a bucket of its own.
    """
    if num_ranks == 1:
        return ()
    buckets: list[Bucket] = []
    for dtype in sorted({member.dtype for member in members}):
        cap = first_cap_bytes if not buckets else cap_bytes
        chosen: list[Member] = []
        size = 0
        for member in reversed([m for m in members if m.dtype == dtype]):
            num_bytes = member.numel * member.element_bytes
            if chosen and size + num_bytes > cap:
                buckets.append(_bucket(chosen))
                chosen, size, cap = [], 0, cap_bytes
            chosen.append(member)
            size += num_bytes
        buckets.append(_bucket(chosen))
    return tuple(buckets)


def _bucket(members: Sequence[Member]) -> Bucket:
    offsets: list[int] = []
    end = 0
    for member in members:
        offsets.append(end)
        end += member.numel
    return Bucket(tuple(m.name for m in members), tuple(offsets), end, members[0].dtype)

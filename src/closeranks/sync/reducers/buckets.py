"""Plans the gradient buckets: which gradients are reduced together, and in what order.

The plan is a pure function of the parameters and the caps, never of which gradient happened to be ready first in some
earlier step: a resumed or re-formed run sums in the same order and is bit-identical. (DDP rebuilds its buckets after
the first backward, so a freshly wrapped model sums in another order; with three or more ranks the bits differ.)

Invariant: members of a bucket agree in everything that is done to a bucket as a whole (summed over further groups,
counted in the norm, reduced when a stage is done), and buckets whose gradients are summed over further groups hold the
same members at the same offsets on every rank of those groups, whatever else these ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketMember:
    """One parameter: the input of the plan."""

    name: str
    numel: int
    dtype: str
    element_bytes: int
    stage: int = 0
    is_primary: bool = True
    partial_over: tuple[int, ...] = ()
    """Indices of the further groups over which its gradient is summed."""
    row: int = 1
    """Elements that must stay in one slice: more than one where memory is not in the order of the tensor's rows."""
    is_exact: bool = False
    """Whether it must not be compressed."""

    @property
    def kind(self) -> tuple[str, bool, tuple[int, ...], int, bool]:
        return self.dtype, self.is_primary, self.partial_over, self.stage, self.is_exact

    @property
    def num_bytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Members that are summed in one collective, laid out one after the other."""

    members: tuple[int, ...]
    """Their positions in the sequence given to the plan."""
    offsets: tuple[int, ...]
    numel: int
    """Includes padding between members and at the end, which belongs to no parameter and holds zeros."""
    dtype: str
    stage: int = 0
    is_primary: bool = True
    partial_over: tuple[int, ...] = ()
    is_exact: bool = False


def plan_buckets(
    members: Sequence[BucketMember], *, cap_bytes: int, first_cap_bytes: int, num_shards: int = 1, align_bytes: int = 1
) -> tuple[GradientBucket, ...]:
    """Buckets in the order in which they are reduced: the last stage first, within a stage as backward fills them.

    A bucket is full when its first parameter has its gradient, so the one whose first parameter comes last is reduced
    first. A parameter larger than the cap gets a bucket of its own. Every bucket divides into ``num_shards`` equal
    slices, and every member begins at a multiple of ``align_bytes``.
    """
    opening = {member.stage: number for number, member in enumerate(members)}  # the last of each stage is reduced first
    batches: list[list[int]] = []
    for kind in dict.fromkeys(member.kind for member in members):
        alike = [number for number, member in enumerate(members) if member.kind == kind]
        alike.reverse()
        is_partial = bool(members[alike[0]].partial_over)
        if is_partial:  # other ranks hold them among other parameters, in another order, under the same names
            alike.sort(key=lambda number: members[number].name)
        is_opening = alike[0] in opening.values() and not is_partial
        batches += _batches(alike, members, cap_bytes, first_cap_bytes if is_opening else cap_bytes)
    batches.sort(key=lambda batch: (-members[batch[0]].stage, -min(batch)))
    return tuple(_bucket(batch, members, num_shards, align_bytes) for batch in batches)


def _batches(
    numbers: Sequence[int], members: Sequence[BucketMember], cap_bytes: int, first_cap_bytes: int
) -> list[list[int]]:
    batches: list[list[int]] = []
    cap = size = 0
    for number in numbers:
        member = members[number]
        if batches and size + member.num_bytes <= cap and member.row == 1:
            batches[-1].append(number)
            size += member.num_bytes
            continue
        cap = cap_bytes if batches else first_cap_bytes
        cap = cap if member.row == 1 else 0  # a member with rows has a bucket of its own
        batches.append([number])
        size = member.num_bytes
    return batches


def _bucket(
    numbers: Sequence[int], members: Sequence[BucketMember], num_shards: int, align_bytes: int
) -> GradientBucket:
    first = members[numbers[0]]
    align = max(align_bytes // first.element_bytes, 1)
    offsets: list[int] = []
    end = 0
    for number in numbers:
        offsets.append(_round_up(end, align))
        end = offsets[-1] + members[number].numel
    numel = _round_up(end, num_shards * (first.row if first.row > 1 else align))
    kind = (first.dtype, first.stage, first.is_primary, first.partial_over, first.is_exact)
    return GradientBucket(tuple(numbers), tuple(offsets), numel, *kind)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

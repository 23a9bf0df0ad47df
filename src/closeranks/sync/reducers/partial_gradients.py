"""Sums partial gradients over groups other than the data axis.

Norms that work on a shard of the sequence, and the two ends of a pipeline that share a tied weight, have partial
gradients. One flat all-reduce per group sums all of them, once per step, after the data reduction.

Invariants: a gradient is summed over its groups in the order its ``partial_over`` names them, which is the same on
every rank, so that all ranks add the same intermediate sums. Groups are processed in the order of their names, which
all members know: two ties may cross stages in opposite order (a decoder mirrors its encoder), so that ranks hold them
in different orders and would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import phase
from closeranks.core.traffic import count_collective


class PartialGradient(NamedTuple):
    """A gradient, in whatever form its reducer keeps it, and the groups over which to sum it."""

    gradient: Tensor
    groups: tuple[dist.ProcessGroup | None, ...]
    """None is torch's default group."""


def sum_partial_gradients(parts: Sequence[PartialGradient]) -> None:
    """In place. Blocks on the CPU; on CUDA the streams wait, not the host."""
    for turn in range(max((len(part.groups) for part in parts), default=0)):
        waiting = [part for part in parts if len(part.groups) > turn]
        for group in sorted({part.groups[turn] for part in waiting}, key=_name):
            mine = [part.gradient for part in waiting if part.groups[turn] is group]
            for dtype in sorted({gradient.dtype for gradient in mine}, key=str):
                _sum([gradient for gradient in mine if gradient.dtype == dtype], group)


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def _sum(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    count_collective("partial", "all-reduce", dist.get_world_size(group), flat)
    with phase("partial.all_reduce"):
        dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view(gradient.shape))

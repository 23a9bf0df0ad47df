"""How are gradients summed over groups besides the data axis?

Norms that work on a share of the sequence, and the two ends of a pipeline that share a tied weight, have gradients that
are still parts of a sum. One flat all-reduce per group carries all of them, once per step, after the data reduction.

Invariants: a gradient is summed over its groups in the order its ``partial_over`` names them, which is the same on
every rank: group by group all ranks add the same stage of the sum. Groups take their turn by name, which all members
know: two ties may cross stages in opposite order (a decoder mirrors its encoder), so that ranks hold them in different
order and would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """A gradient, in whatever form its strategy keeps it, and the groups it is to be summed over."""

    gradient: Tensor
    groups: tuple[dist.ProcessGroup | None, ...]
    """None is torch's default group."""


def sum_parts(parts: Sequence[Part]) -> None:
    """In place. Blocks on the CPU; on CUDA it orders streams and does not stop the host."""
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
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view(gradient.shape))

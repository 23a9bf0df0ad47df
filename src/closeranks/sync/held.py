"""What does a strategy read off the parameters it is given?

Invariant: nothing here depends on values; ranks that hold the same parameters read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.pieces import Piece
from closeranks.core.protocols import Held
from closeranks.sync.buckets import Member


class DataGroup(Protocol):
    """What a strategy needs to know of a group: ``parallel.group.Group`` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


def hold_whole(module: nn.Module) -> tuple[Held, ...]:
    """The parameters of a module that no other axis has cut."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(Held(p, Piece.whole(name, tuple(p.shape)), tuple(more)) for p, (name, *more) in names.items())


def as_members(
    held: Sequence[Held], *, keep_rows: bool = False, is_exact: Callable[[Held], bool] = lambda one: False
) -> tuple[Member, ...]:
    """The parameters as a plan sees them; ``keep_rows`` where shards are to be boxes or ranges of rows, ``is_exact``
    of those that must not be compressed."""
    groups = list(dict.fromkeys(group for one in held for group in one.partial_over))
    return tuple(
        Member(
            one.piece.name,
            one.parameter.numel(),
            str(one.parameter.dtype),
            one.parameter.element_size(),
            one.stage,
            one.is_spoken,
            tuple(groups.index(group) for group in one.partial_over),
            row_of(one.parameter) if keep_rows else 1,
            is_exact(one),
        )
        for one in held
    )


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps that lies in memory as this one does."""
    return torch.empty_like(parameter, device="meta").stride()


def outer_dim(parameter: Tensor) -> int:
    """The dim that memory runs through slowest."""
    strides = dense_strides(parameter)
    return max(range(len(strides)), key=lambda dim: (parameter.shape[dim] > 1, strides[dim]))


def row_of(parameter: Tensor) -> int:
    """1 where memory is in the order of rows; otherwise how many elements lie under one index of the outer dim."""
    is_by_rows = torch.empty_like(parameter, device="meta").is_contiguous()
    return 1 if is_by_rows else parameter.numel() // parameter.shape[outer_dim(parameter)]


def view_of(buffer: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A tensor with the parameter's shape and strides: fused optimizers walk weight and gradient in memory order."""
    return buffer.as_strided(parameter.shape, dense_strides(parameter), buffer.storage_offset() + offset)

"""What a reducer derives from the parameters it is given: bucket members, strides, views.

Invariant: nothing here depends on values; ranks that hold the same parameters get the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.pieces import Piece
from closeranks.core.protocols import LocalParameter
from closeranks.sync.reducers.buckets import BucketMember


class CommGroup(Protocol):
    """What a reducer needs of a group; ``parallel.process_group.RankGroup`` implements it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


def local_parameters(module: nn.Module) -> tuple[LocalParameter, ...]:
    """The parameters of a module that no other axis has sharded."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(
        LocalParameter(p, Piece.whole(name, tuple(p.shape)), tuple(more)) for p, (name, *more) in names.items()
    )


def bucket_members(
    held: Sequence[LocalParameter],
    *,
    keep_rows: bool = False,
    is_exact: Callable[[LocalParameter], bool] = lambda one: False,
) -> tuple[BucketMember, ...]:
    """The parameters as input of a bucket plan; ``keep_rows`` where shards must be boxes or ranges of rows,
    ``is_exact`` for those that must not be compressed."""
    groups = list(dict.fromkeys(group for one in held for group in one.partial_over))
    return tuple(
        BucketMember(
            one.piece.name,
            one.parameter.numel(),
            str(one.parameter.dtype),
            one.parameter.element_size(),
            one.stage,
            one.is_primary,
            tuple(groups.index(group) for group in one.partial_over),
            row_numel(one.parameter) if keep_rows else 1,
            is_exact(one),
        )
        for one in held
    )


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor with this one's memory order."""
    return torch.empty_like(parameter, device="meta").stride()


def slowest_dim(parameter: Tensor) -> int:
    """The slowest-varying dim in memory."""
    strides = dense_strides(parameter)
    return max(range(len(strides)), key=lambda dim: (parameter.shape[dim] > 1, strides[dim]))


def row_numel(parameter: Tensor) -> int:
    """1 where memory is in row order; otherwise the number of elements under one index of the slowest dim."""
    is_by_rows = torch.empty_like(parameter, device="meta").is_contiguous()
    return 1 if is_by_rows else parameter.numel() // parameter.shape[slowest_dim(parameter)]


def view_like(buffer: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view with the parameter's shape and strides: fused optimizers read weight and gradient in memory order."""
    return buffer.as_strided(parameter.shape, dense_strides(parameter), buffer.storage_offset() + offset)

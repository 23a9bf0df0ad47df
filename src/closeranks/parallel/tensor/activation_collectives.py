"""Activation collectives of tensor parallelism: how activations and gradients are communicated along the tensor axis.

Each is an autograd function with a collective in its forward, its backward or both. Invariant: backward is the
transpose of forward over all ranks together, so a split model's gradients are those of the whole one.

Sums are computed in the tensor's own dtype, as is usual: half-precision activations are summed in half precision, with
up to ``size`` roundings more than one product has; float32 and float64 are not rounded further. The collectives are
torch's functional ones: the same calls run eagerly and inside a compiled block, where they can overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.phases import phase
from closeranks.core.traffic import RingOperation, count_collective
from closeranks.parallel.process_group import RankGroup

_PHASES: dict[RingOperation, str] = {
    "all-reduce": "tensor.all_reduce",
    "all-gather": "tensor.all_gather",
    "reduce-scatter": "tensor.reduce_scatter",
}
SEQUENCE = 1
"""The dim of activations [batch, positions, features] that ``all_gather`` concatenates and ``reduce_scatter``
splits."""


@dataclass(frozen=True)
class TensorAxisGroup:
    """A tensor-parallel group as plain values: compiled code cannot hold a process group, and modules that hold this
    can be deep-copied."""

    rank: int
    size: int
    name: str
    """The name under which torch finds the process group."""

    @classmethod
    def of(cls, group: RankGroup) -> TensorAxisGroup:
        process_group = group.process_group or dist.group.WORLD
        assert process_group is not None
        return cls(group.rank, group.size, process_group.group_name)

    def sum(self, tensor: Tensor) -> Tensor:
        return _all_reduce(tensor, "sum", self.size, self.name)

    def max(self, tensor: Tensor) -> Tensor:
        return _all_reduce(tensor, "max", self.size, self.name)


def copy(tensor: Tensor, axis: TensorAxisGroup) -> Tensor:
    """Identity in forward, for a tensor that every rank reads whole; the gradient is all-reduced."""
    return _apply(_Copy, tensor, axis.size, axis.name)


def all_reduce(tensor: Tensor, axis: TensorAxisGroup) -> Tensor:
    """All-reduce partial sums: every rank gets the total. Identity in backward."""
    return _apply(_Sum, tensor, axis.size, axis.name)


def all_gather(tensor: Tensor, axis: TensorAxisGroup, dim: int = SEQUENCE) -> Tensor:
    """All-gather shards of a sequence on every rank; the gradient is reduce-scattered."""
    return _apply(_Gather, tensor, dim, axis.size, axis.name)


def reduce_scatter(tensor: Tensor, axis: TensorAxisGroup, dim: int = SEQUENCE) -> Tensor:
    """Reduce-scatter partial sums: each rank gets its shard of the total along the sequence."""
    if tensor.shape[dim] % axis.size:
        what = f"{tensor.shape[dim]} positions of a sample do not split over {axis.size} tensor ranks"
        raise ModelError(what, f"Set data.seq_len to a multiple of {axis.size}.")
    return _apply(_Scatter, tensor, dim, axis.size, axis.name)


def all_gather_last_dim(tensor: Tensor, axis: TensorAxisGroup) -> Tensor:
    """All-gather shards of the last dim, for a tensor from which all ranks then compute the same values."""
    return _apply(_Whole, tensor, axis.rank, axis.size, axis.name)


ACTIVATION_COLLECTIVES: dict[str, Callable[[Tensor, TensorAxisGroup], Tensor]] = {
    "copy": copy,
    "sum": all_reduce,
    "gather": all_gather,
    "scatter": reduce_scatter,
    "whole": all_gather_last_dim,
}
"""By the names that ``core.protocols.ActivationCollectives`` uses."""


BLOCKING = {"_all_reduce": "all_reduce", "_all_gather": "all_gather", "_reduce_scatter": "reduce_scatter"}
"""The functions of this module that issue a collective and wait for it (their last argument is the name of the group):
who records collectives replaces them."""


_functional = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather_into_tensor(tensor: Tensor, size: int, name: str) -> Tensor:
    """torch's functional all-gather for CPU tensors, sent as a plain all-gather.

    torch sends it as an ``ALLGATHER_COALESCED``. The two threads of a Gloo group each write the name of the work they
    finished to one ``std::string``, without a lock. A name of more than 15 characters lives on the heap, so the two can
    write to freed memory: the process crashes, or an unrelated object is overwritten. Shorter names, which all other
    collectives have, stay inside the string.
    """
    gathered = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    arriving: Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(tensor, size, name, out=gathered)
    return arriving


_functional.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, name: str) -> Tensor:
        ctx.arguments = (size, name)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_reduce(gradients[0], "sum", *ctx.arguments), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, name: str) -> Tensor:
        return _all_reduce(tensor, "sum", size, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
        ctx.arguments = (dim, size, name)
        return _all_gather(tensor, dim, size, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(gradients[0], *ctx.arguments), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
        ctx.arguments = (dim, size, name)
        return _reduce_scatter(tensor, dim, size, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(gradients[0], *ctx.arguments), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, size: int, name: str) -> Tensor:
        ctx.arguments = (rank, size)
        return _all_gather(tensor, tensor.ndim - 1, size, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rank, size = ctx.arguments
        width = gradients[0].shape[-1] // size
        return gradients[0].narrow(-1, rank * width, width), None, None, None


def _all_reduce(tensor: Tensor, operation: str, size: int, name: str) -> Tensor:
    """Out of place: the input may have other readers (a gradient is read by several nodes of the graph)."""
    summed = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), operation, name)
    return _arrived(summed, "all-reduce", size, tensor)


def _all_gather(tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
    """The collective concatenates along dim 0; any other dim costs one copy, unless the dims before it have size 1."""
    shards = torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), size, name)
    shards = _arrived(shards, "all-gather", size, shards)
    if dim == 0:
        return shards
    parted: Tensor = shards.unflatten(0, (size, tensor.shape[0]))
    return parted.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
    """The collective splits along dim 0; any other dim costs one copy, unless the dims before it have size 1."""
    if dim:
        tensor = tensor.unflatten(dim, (size, tensor.shape[dim] // size)).movedim(dim, 0).flatten(0, 1)
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", size, name)
    return _arrived(scattered, "reduce-scatter", size, tensor)


def _arrived(tensor: Tensor, operation: RingOperation, size: int, whole: Tensor) -> Tensor:
    """Wait for the collective: the current stream waits, not the host (with Gloo the host does). In compiled code it is
    neither timed nor counted. ``whole``: as ``count_collective`` wants it."""
    arrived: Tensor
    if torch.compiler.is_compiling():
        arrived = torch.ops._c10d_functional.wait_tensor(tensor)
    else:
        count_collective("tensor", operation, size, whole)
        with phase(_PHASES[operation]):
            arrived = torch.ops._c10d_functional.wait_tensor(tensor)
    return arrived

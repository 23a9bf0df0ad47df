"""What a module may know of the tensor axis along which it is sharded.

A module that must know (a loss over a shard of the vocabulary, dropout on a shard of the sequence) declares an
attribute ``tensor_axis = None``; the code that shards the model sets it. Invariant: a module whose ``tensor_axis`` is
None is not sharded and computes as if there were no such axis, at no cost.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorAxis(Protocol):
    """This rank's index on the axis, and reductions over it; the reductions are not differentiable."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor: ...

    def max(self, tensor: Tensor) -> Tensor: ...

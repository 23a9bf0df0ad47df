"""What may a module know of the tensor axis it was split along?

A module that must know (a loss over a share of the vocabulary, dropout on a share of the sequence) declares an
attribute ``tensor_axis = None``; whoever splits the model puts the axis there. Invariant: None is a module that is not
split and computes as if there were no such axis, at no cost.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorAxis(Protocol):
    """This rank's place on the axis, and sums over it; neither call has a gradient of its own."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor: ...

    def max(self, tensor: Tensor) -> Tensor: ...

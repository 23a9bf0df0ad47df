"""Bytes per element of what a rank holds, and the number of state tensors that an optimizer keeps per parameter.

Weights, gradients and optimizer state are float32 under bf16 and fp16 too (autocast casts copies on the fly), so only
float64 changes their size. ``memory_per_rank`` and ``activations`` compute the memory of a rank from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float64", "float32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "sgd", "lars", "lamb"]


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element, by kind of tensor."""

    state: int
    """Weights, gradients and optimizer state; also what norms and the loss compute in."""
    compute: int
    """Operands and results of matrix products and attention."""
    stream: int
    """Hidden states between the blocks: half precision only in bf16, since the range of fp16 is too small."""
    wire: int
    """Weights of blocks while they are all-gathered; half precision only in bf16 as well."""

    @property
    def is_half(self) -> bool:
        return self.compute < self.state


_WIDTHS: dict[Precision, ElementBytes] = {
    "float64": ElementBytes(8, 8, 8, 8),
    "float32": ElementBytes(4, 4, 4, 4),
    "bf16": ElementBytes(4, 2, 2, 2),
    "fp16": ElementBytes(4, 2, 4, 4),
}
_TENSORS_REMEMBERED: dict[OptimizerName, int] = {"adamw": 2, "sgd": 1, "lars": 1, "lamb": 2}


@dataclass(frozen=True, slots=True)
class NamedBytes:
    """Bytes with a name."""

    name: str
    num_bytes: int


NUM_SNAPSHOT_COPIES = 2
"""Snapshots of a state in host memory, written in turn: a worker killed while writing one leaves the other valid."""


def snapshot_bytes(own: int, of_peer: int = 0) -> int:
    """Host memory for one rank's snapshots of its own state, and of the state that it keeps for a peer."""
    return NUM_SNAPSHOT_COPIES * (own + of_peer)


def element_bytes(precision: Precision) -> ElementBytes:
    return _WIDTHS[precision]


def num_optimizer_states(optimizer: OptimizerName) -> int:
    """Tensors of a parameter's size that the optimizer keeps for it."""
    return _TENSORS_REMEMBERED[optimizer]

"""How many bytes does a model's state take on one rank: weights, gradients and what the optimizer remembers?

Weights, gradients and optimizer state are float32 under bf16 and fp16 too (autocast casts copies on the fly), so only
float64 changes the width. Invariant: this is state alone; activations, gathered shards and buffers of the collectives
come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float64", "float32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "sgd"]

_WIDTH: dict[Precision, int] = {"float64": 8, "float32": 4, "bf16": 4, "fp16": 4}
_TENSORS_REMEMBERED: dict[OptimizerName, int] = {"adamw": 2, "sgd": 1}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes on the rank that holds the most."""

    params: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer


def state_bytes(
    num_params: int,
    *,
    precision: Precision = "float32",
    optimizer: OptimizerName = "adamw",
    zero: int = 0,
    shard: int = 1,
) -> StateBytes:
    """State of ``num_params`` parameters with ZeRO stage ``zero`` over ``shard`` ranks (1: the optimizer's share is
    split, 2: gradients too, 3: weights too)."""
    whole = num_params * _WIDTH[precision]
    split = -(-num_params // shard) * _WIDTH[precision]
    return StateBytes(
        params=split if zero >= 3 else whole,
        gradients=split if zero >= 2 else whole,
        optimizer=(split if zero >= 1 else whole) * _TENSORS_REMEMBERED[optimizer],
    )

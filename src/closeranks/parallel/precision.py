"""The number formats in which a run computes and keeps its weights.

Mixed precision keeps float32 weights and lets autocast choose per operation; float64 is for proofs. Invariant: the
format of weights, gradients and optimizer state is the same on every rank and never depends on the layout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.core.protocols import Batch

_COMPUTE = {"float32": None, "float64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """``name`` is what the job says: float32, float64, bf16 or fp16."""

    name: str

    @property
    def weights(self) -> torch.dtype:
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def compute(self) -> torch.dtype:
        """The dtype of matrix products; the device's peak FLOP/s is measured in it."""
        return _COMPUTE[self.name] or self.weights

    @property
    def scales_loss(self) -> bool:
        """fp16 gradients underflow without a loss scale; the other formats have the range."""
        return self.name == "fp16"

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype = _COMPUTE[self.name]
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def cast(self, batch: Batch) -> Batch:
        """Cast floating-point inputs to the weights' format; autocast casts further where it must."""
        return {key: _cast(value, self.weights) for key, value in batch.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value

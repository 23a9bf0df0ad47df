"""A Linear whose weight gradient stays in float32 under mixed precision.

Autocast rounds a weight's gradient to half precision when the matrix unit writes it, then copies it to float32. Here
the unit writes its float32 sums directly: one rounding and two passes over the gradient fewer (about 1% of a step on an
H200: the plain loop of benchmarks/gpu.py has autocast's own). Invariant: values and gradients are those of
``nn.Linear`` under autocast, up to that rounding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear`` without a bias; on CUDA under autocast its weight gradient leaves in float32."""

    keeps_cast: bool = True
    """Whether the half-precision copy of the weight is kept for backward. Off where weights are freed after forward
    (ZeRO-3): the kept copies would be half the model again, and casting again costs one pass over the weight."""

    runs_as_on_cuda: ClassVar[bool] = False
    """Whether every device runs products as CUDA does: on while a dry run counts what a GPU would hold."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if not ((input.is_cuda or Linear.runs_as_on_cuda) and torch.is_autocast_enabled(device)):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            output: Tensor = _Product.apply(input.to(dtype), self.weight, self.keeps_cast)  # type: ignore[no-untyped-call]
            return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, keeps_cast: bool) -> Tensor:
        half = weight.to(input.dtype)
        ctx.save_for_backward(input, half if keeps_cast else weight)
        # As rows: from a gathered sequence, whose strides are odd where the batch is 1, it would be a batched product,
        # which is not among those that selective recompute keeps.
        output: Tensor = F.linear(input.reshape(-1, input.shape[-1]), half).unflatten(0, input.shape[:-1])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight = ctx.saved_tensors
        half = weight.to(input.dtype)
        rows = gradients[0].reshape(-1, half.shape[0])
        in_float32: Tensor = torch.mm(rows.t(), input.reshape(-1, half.shape[1]), out_dtype=torch.float32)
        return gradients[0] @ half, in_float32, None

"""Initializes a parameter with random values.

Invariant: a value depends on the generator alone, not on device, precision or layout: it is drawn in float32, as one
whole tensor, on the generator's own device, and then copied into place.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal values with mean 0. A parameter that is not float32 on the generator's device costs a second copy."""
    if parameter.dtype == torch.float32 and parameter.device == generator.device and parameter.is_contiguous():
        parameter.normal_(0.0, std, generator=generator)
        return
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
    parameter.copy_(drawn.normal_(0.0, std, generator=generator))


@torch.no_grad()
def fill_constant(parameter: Tensor, value: float) -> None:
    parameter.fill_(value)

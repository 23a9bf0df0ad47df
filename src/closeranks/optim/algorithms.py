"""The update rules: which torch optimizer implements each, and the state it keeps per parameter.

A rule is one function under ``@ALGORITHMS.register(name)``. Invariant: all state exists, as zeros, before the first
step. torch would create it inside the first step, and fused SGD leaves it uninitialised when that step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ParameterShard
from closeranks.core.registry import Registry
from closeranks.optim.config import OptimConfig
from closeranks.optim.freezable_adamw import FreezableAdamW

Total = Callable[[Tensor], Tensor]
"""Sums a small tensor over all ranks of the run, without a host sync; every rank gets the same bits."""

Bind = Callable[[Sequence[ParameterShard], Sequence[str], Total | None], None]
"""Called once, before the first step, with the parameter shards, all trained parameters of the model, and the sum over
ranks (None where each rank holds its parameters whole)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """torch's optimizer, and its initial state (zeros) for one parameter."""

    optimizer: torch.optim.Optimizer
    init_state: Callable[[Tensor], dict[str, Tensor]]
    bind: Bind | None = None
    """Set for a rule that needs whole parameters (their norms), even where this rank holds shards."""
    on_restored: Callable[[], None] | None = None
    """Called when its state was loaded from a checkpoint or snapshot."""


Build = Callable[[list[dict[str, Any]], OptimConfig], Algorithm]

ALGORITHMS: Registry[Build] = Registry("optimizer")


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


@ALGORITHMS.register("adamw")
def _adamw(groups: list[dict[str, Any]], config: OptimConfig) -> Algorithm:
    def init_state(parameter: Tensor) -> dict[str, Tensor]:
        # The fused kernel needs its counter in float32 on the parameter's device, whatever the parameter's type.
        counter = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": counter, "exp_avg": _zeros(parameter), "exp_avg_sq": _zeros(parameter)}

    return Algorithm(FreezableAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True), init_state)


@ALGORITHMS.register("sgd")
def _sgd(groups: list[dict[str, Any]], config: OptimConfig) -> Algorithm:
    if config.momentum:
        _refuse_broken_kernel(parameter for group in groups for parameter in group["params"])

    def init_state(parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": _zeros(parameter)} if config.momentum else {}

    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
    return Algorithm(optimizer, init_state)


def _refuse_broken_kernel(parameters: Iterable[Tensor]) -> None:
    """torch's fused SGD for half types on the CPU fills the momentum with uninitialised memory (seen in 2.13)."""
    if any(p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
        what = "sgd with momentum cannot update bfloat16 or float16 parameters on the CPU"
        fix = "Keep the parameters in float32 and set train.precision, or set optim.momentum = 0, or use adamw."
        raise ModelError(what, fix)

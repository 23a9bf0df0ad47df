"""AdamW whose second moments can be frozen, for training with compressed gradients (1-bit Adam).

[Note: frozen moments] 1-bit Adam (Tang et al. 2021): signs of gradients say nothing about their magnitudes, so second
moments are learnt while gradients are exact, then frozen, and divide the momentum of the compressed gradients. The step
counter is frozen with the moments, and so is their bias correction. (The paper compresses the momentum, we compress the
gradient; the momentum is linear in it, and all ranks hold the same.)

[Note: the floor] A sign is sent with the mean magnitude of its block, whatever its own magnitude: divided by a second
moment far below its neighbours', a weight with small gradients would be moved by their noise. So the root of a second
moment is at least the mean of the known roots in its tensor.

Invariant: as with the fused kernels, a step that is not taken changes nothing, without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FreezableAdamW(torch.optim.AdamW):
    """torch's AdamW, until ``is_frozen`` is set."""

    is_frozen = False
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self.is_frozen:
            return super().step(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step_frozen(group, parameters)
        return None

    def _step_frozen(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        rate, (beta, beta_squares) = group["lr"], group["betas"]
        momenta = [state["exp_avg"] for state in states]
        ok, gradients = self._finite(parameters, momenta)
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        squares = [state["exp_avg_sq"] for state in states]
        roots = list(torch._foreach_sqrt(squares))
        counters = [state["step"].to(root.dtype) for state, root in zip(states, roots, strict=True)]
        torch._foreach_div_(roots, [(1 - beta_squares**count).sqrt() for count in counters])
        known = [square > 0 for square in squares]
        roots = [
            torch.maximum(root, root.sum() / some.sum().clamp_(min=1)) for root, some in zip(roots, known, strict=True)
        ]
        torch._foreach_add_(roots, group["eps"])
        moves = list(torch._foreach_div(momenta, roots))
        torch._foreach_mul_(moves, [-rate / (1 - beta**count) for count in counters])
        # An element without a gradient so far has no known magnitude, and signs are never zero: leave it unchanged.
        moves = [torch.where(some & (ok > 0), move, 0.0) for some, move in zip(known, moves, strict=True)]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, [1 - rate * group["weight_decay"] * ok.to(p.dtype) for p in parameters])
        torch._foreach_add_(parameters, moves)

    def _finite(self, parameters: list[Tensor], momenta: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Whether the step is taken, and its gradients; if it is not, gradients that leave the momenta unchanged."""
        found_inf = torch.zeros((), device=parameters[0].device) if self.found_inf is None else self.found_inf
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None:
            factor = self.grad_scale.reciprocal()
            gradients = list(torch._foreach_mul(gradients, factor.to(gradients[0].dtype)))
        pairs = zip(momenta, gradients, strict=True)
        return 1.0 - found_inf, [torch.where(found_inf > 0, momentum, gradient) for momentum, gradient in pairs]

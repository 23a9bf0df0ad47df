"""How does AdamW go on once its second moments are frozen?

[Note: frozen moments] 1-bit Adam (Tang et al. 2021): signs of gradients say nothing about their sizes, so second
moments are learnt while gradients travel exactly, then kept, and divide what the momentum makes of compressed ones.
With the moments the counter stands still, and with it the correction of their beginnings. (There the momentum is
compressed, here the gradient that it is made of; the momentum is linear in it, and all ranks hold the same.)

[Note: the floor] A sign travels with the mean size of its block, whatever its own size: divided by a second moment far
below its neighbours', a quiet weight would be thrown about by their noise. So no root counts for less than the mean of
those in its tensor that are known.

Invariant: as with the fused kernels, a step that is not taken changes nothing, without the host being asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FreezableAdamW(torch.optim.AdamW):
    """torch's own, until ``is_frozen`` is set."""

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
        # Nothing is known of the size of what had no gradient until then, and signs are never zero: it stays.
        moves = [torch.where(some & (ok > 0), move, 0.0) for some, move in zip(known, moves, strict=True)]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, [1 - rate * group["weight_decay"] * ok.to(p.dtype) for p in parameters])
        torch._foreach_add_(parameters, moves)

    def _finite(self, parameters: list[Tensor], momenta: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Whether the step is taken, and its gradients; where it is not, what leaves the momenta as they are."""
        found_inf = torch.zeros((), device=parameters[0].device) if self.found_inf is None else self.found_inf
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None:
            factor = self.grad_scale.reciprocal()
            gradients = list(torch._foreach_mul(gradients, factor.to(gradients[0].dtype)))
        pairs = zip(momenta, gradients, strict=True)
        return 1.0 - found_inf, [torch.where(found_inf > 0, momentum, gradient) for momentum, gradient in pairs]

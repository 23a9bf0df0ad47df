"""Vocabulary-parallel cross-entropy: the loss of logits whose vocabulary is sharded over ranks.

Each rank holds the logits of its shard of the vocabulary; three numbers per token (largest logit, sum of exponentials,
the target's logit) are communicated in two collectives, the logits themselves never are. Invariant: value and gradient
are those of ``F.cross_entropy`` on the whole vocabulary, the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from closeranks.models.llama.tensor_axis import TensorAxis

_NOT_LOCAL = -100
"""The local index of a target that another rank holds; ``nll_loss`` ignores it."""


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
    """Cross-entropy of each token [N], in float32 at least, from this rank's logits [N, vocabulary / size]."""
    each: Tensor = _SplitCrossEntropy.apply(logits, targets, axis)  # type: ignore[no-untyped-call]
    return each


def local_index(ids: Tensor, width: int, axis: TensorAxis) -> Tensor:
    """The index of each id in this rank's shard of ``width`` entries; ``_NOT_LOCAL`` if another rank holds it.

    An id outside the whole vocabulary is also outside the first or last shard, whose lookup then fails as it would in
    one process, without an explicit check (which would be a sync on an accelerator).
    """
    local = ids - axis.rank * width
    below = local < 0 if axis.rank > 0 else torch.zeros_like(local, dtype=torch.bool)
    above = local >= width if axis.rank < axis.size - 1 else torch.zeros_like(local, dtype=torch.bool)
    return local.masked_fill(below | above, _NOT_LOCAL)


class _SplitCrossEntropy(torch.autograd.Function):
    """Keeps the logits in their own dtype and one number per token, not the float32 probabilities: backward recomputes
    them, which takes one pass more and half the memory or less."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        peak = axis.max(wide.amax(dim=-1))
        shifted = wide - peak.unsqueeze(-1)
        local = local_index(targets, wide.shape[-1], axis)
        target = -F.nll_loss(shifted, local, ignore_index=_NOT_LOCAL, reduction="none")
        total, target = axis.sum(torch.stack((shifted.exp().sum(dim=-1), target))).unbind()
        log_total = total.log()
        ctx.save_for_backward(logits, peak + log_total, local)
        return log_total - target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, log_total, local = ctx.saved_tensors
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = (wide - log_total.unsqueeze(-1)).exp()
        probabilities = _less_one_at(probabilities, local)
        return (probabilities * gradients[0].unsqueeze(-1)).to(logits.dtype), None, None


def _less_one_at(probabilities: Tensor, local: Tensor) -> Tensor:
    """``probabilities`` minus one at each token's target, where this rank holds it.

    Compiled, a comparison is fused and no tensor of the vocabulary's width is written; eager, one would be, so there
    the few entries are changed in place.
    """
    if torch.compiler.is_compiling():
        columns = torch.arange(probabilities.shape[-1], device=probabilities.device)
        return probabilities - (columns == local.unsqueeze(-1)).to(probabilities.dtype)
    here = (local != _NOT_LOCAL).to(probabilities.dtype)
    return probabilities.scatter_add_(-1, local.clamp(min=0).unsqueeze(-1), -here.unsqueeze(-1))

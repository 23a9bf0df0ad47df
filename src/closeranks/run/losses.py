"""What did the user's loss return, and how much does it count?

Invariant: a loss is a sum with a weight, so that adding micro-batches of different sizes is exact; a plain scalar is
taken as the mean over the samples of its micro-batch, which is what loss functions return by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Loss

_FIX = "Return a scalar tensor (the mean over the samples) or closeranks.Loss(total, weight)."


def as_loss(value: object, num_samples: int, metrics: Sequence[str]) -> Loss:
    if isinstance(value, Loss):
        if set(value.metrics) != set(metrics):
            declared, got = ", ".join(metrics) or "none", ", ".join(value.metrics) or "none"
            fix = "Name the same ones in model.metrics, so that every rank votes on them."
            raise ModelError(f"the loss reports the metrics {got}, but {declared} are declared", fix)
        _check(value.total)
        return value
    total = _check(value)
    return Loss(total * num_samples, float(num_samples))


def _check(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ModelError(f"the loss is a {type(value).__name__}, not a tensor", _FIX)
    if value.numel() != 1:
        raise ModelError(f"the loss has shape {tuple(value.shape)}, not one value", _FIX)
    if not value.requires_grad:
        fix = "Compute it from the model's output without detach(), item() or no_grad()."
        raise ModelError("the loss does not depend on any trainable parameter", fix)
    return value.reshape(())

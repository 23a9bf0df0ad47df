"""Checks what a loss function returned, and turns it into a sum with a weight.

Invariant: a loss is a sum with a weight, so that micro-batches of different sizes add up exactly; a plain scalar is
taken as the mean over the samples of its micro-batch, which is what loss functions return by default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Loss


def as_loss(result: Any, num_samples: int, metrics: tuple[str, ...], place: str = "the loss") -> Loss:
    """Checks types, shapes, graph and names only, without a host sync. ``place`` names the function in messages."""
    loss = result if isinstance(result, Loss) else _mean_as_sum(place, result, num_samples)
    if not isinstance(loss.total, Tensor):
        raise ModelError(f"{place} returned a Loss whose total is {kind_of(loss.total)}", "Make it a tensor.")
    _check_scalar(place, loss.total)
    if torch.is_grad_enabled() and not loss.total.requires_grad:
        what = f"{place} returned a loss that depends on no parameter, so nothing would be learned"
        raise ModelError(what, "Compute it from the module's output, without detach(), item() or no_grad().")
    if set(loss.metrics) != set(metrics):
        declared, given = (", ".join(sorted(names)) or "none" for names in (metrics, loss.metrics))
        what = f"{place} reports the metrics {given}, but model.metrics says {declared}"
        raise ModelError(what, "List exactly the names it reports.")
    return loss


def kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _mean_as_sum(place: str, result: Any, num_samples: int) -> Loss:
    """Turn a mean over the micro-batch into a sum, to which micro-batches of other sizes can be added."""
    if not isinstance(result, Tensor):
        what = f"{place} returned {kind_of(result)}, not a tensor"
        raise ModelError(what, "Return the mean loss of the batch, or a closeranks.Loss.")
    _check_scalar(place, result)
    return Loss(total=result * num_samples, weight=float(num_samples))


def _check_scalar(place: str, total: Tensor) -> None:
    if hasattr(total, "to_local"):  # a DTensor: its backward would leave out what the other ranks hold
        what = f"{place} was computed from the module's parameters themselves, of which each rank holds only a shard"
        raise ModelError(what, "Put a term on weights into optim.weight_decay, or use layout.zero = 2 or less.")
    if total.ndim:
        raise ModelError(f"{place} returned a tensor of shape {list(total.shape)}, not one number", "Take its mean.")

"""Sums the loss, weight and metrics of a rank's micro-batches.

The sums are float64 on the device, without a host sync. Invariant: of the ranks that work on the same micro-batch only
one adds it (``reports_loss``), so that the vote counts every micro-batch once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from closeranks.core.protocols import Loss


class LossSums:
    """Loss, weight and metrics of the micro-batches added so far."""

    def __init__(self, metrics: Sequence[str], device: torch.device, *, reports_loss: bool = True) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._reports_loss = reports_loss
        self.loss, self.weight = zero.clone(), zero.clone()
        self.metrics = {name: zero.clone() for name in metrics}

    def add(self, loss: Loss) -> None:
        if not self._reports_loss:
            return
        self.loss += loss.total.detach()
        self.weight += loss.weight
        for name, value in loss.metrics.items():
            self.metrics[name] += value.detach() if isinstance(value, Tensor) else value

    def as_vector(self) -> Tensor:
        """Loss, weight, then the metrics, as one vector."""
        return torch.stack([self.loss, self.weight, *self.metrics.values()])

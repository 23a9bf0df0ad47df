"""The loss scale, which keeps small gradients from underflowing in fp16.

Invariant: the scale lives on the device and is never read by the host; all ranks update it by the same verdict, so it
is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from closeranks.core.errors import CheckpointError
from closeranks.optim.config import LossScaleConfig


class LossScale:
    """A scale that grows while steps succeed and shrinks when one overflows; always 1 where it is not enabled."""

    def __init__(self, config: LossScaleConfig, enabled: bool, device: torch.device) -> None:
        self._config = config
        self._enabled = enabled
        start = max(config.init, config.minimum) if enabled else 1.0
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self._num_good = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, ok: Tensor) -> None:
        """Count this step: ``ok`` is 1 where every gradient of every rank was finite, 0 where not."""
        if not self._enabled:
            return
        overflow = 1.0 - ok.to(torch.float32)
        config = self._config
        torch._amp_update_scale_(self.scale, self._num_good, overflow, config.growth, config.backoff, config.interval)
        self.scale.clamp_(min=config.minimum)

    def state(self) -> dict[str, Any]:
        """Empty where disabled: a run that changes its precision starts with the initial scale."""
        return {"scale": self.scale, "num_good": self._num_good} if self._enabled else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not self._enabled or not state:
            return
        if set(state) != {"scale", "num_good"}:
            raise CheckpointError(f"the loss scale's state has the keys {sorted(state)}", "Save it with this version.")
        self.scale.copy_(state["scale"])
        self._num_good.copy_(state["num_good"])

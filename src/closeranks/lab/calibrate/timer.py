"""How long does an operation take on a device? The lower quartile of some repetitions: what disturbs makes it longer.

Invariant: a time includes all work that the operation gave to the device, and none that was given to it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEAST_S = 2e-4
"""A repetition lasts at least this long: operations that are shorter are repeated within it."""


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    device: torch.device
    budget_s: float = 0.03
    """Of one operation, after one repetition to warm up."""
    most_reps: int = 15
    least_reps: int = 3

    def seconds(self, action: Callable[[], object]) -> float:
        self._once(action, 1)
        first_s = self._once(action, 1)
        inner = max(1, min(100, int(_LEAST_S / max(first_s, 1e-9))))
        reps = max(self.least_reps, min(self.most_reps, int(self.budget_s / max(first_s * inner, 1e-9))))
        return sorted(self._once(action, inner) for _ in range(reps))[reps // 4] / inner

    def _once(self, action: Callable[[], object], inner: int) -> float:
        self.synchronize()
        began_at = time.perf_counter()
        for _ in range(inner):
            action()
        self.synchronize()
        return time.perf_counter() - began_at

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

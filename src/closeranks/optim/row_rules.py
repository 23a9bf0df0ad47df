"""The update rules of embedding rows: what does one gradient do to a row and to its state?

Pure functions of (rows, state, gradients), each row by itself, so that workers and servers apply the same rule to
whichever rows they hold. State of a row is touched only when it has a gradient. Invariant: a row's result does not
depend on which other rows are updated in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.core.registry import Registry

State = Mapping[str, Tensor]
Updated = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class RowAdagrad:
    """Row-wise Adagrad: one accumulator a row, of the mean square of its gradients.

    a = a + mean(g^2); row = row - lr g / (sqrt(a) + eps).
    """

    eps: float = 1e-8

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        return {"sum": rows.new_zeros(len(rows))}

    def update(self, rows: Tensor, state: State, gradients: Tensor, *, lr: float) -> Updated:
        total = state["sum"] + gradients.square().mean(dim=1)
        return rows - lr * gradients / (total.sqrt() + self.eps).unsqueeze(1), {"sum": total}


@dataclass(frozen=True, slots=True)
class RowAdam:
    """Row-wise Adam: a first moment per value, one second moment and one step counter a row.

    Both moments are corrected by the updates of the row itself, so a rare row takes full first steps. Untouched rows
    keep their moments: they do not move on.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        return {
            "exp_avg": torch.zeros_like(rows),
            "exp_avg_sq": rows.new_zeros(len(rows)),
            "step": rows.new_zeros(len(rows)),
        }

    def update(self, rows: Tensor, state: State, gradients: Tensor, *, lr: float) -> Updated:
        first, second = self.betas
        step = state["step"] + 1
        mean = first * state["exp_avg"] + (1 - first) * gradients
        square = second * state["exp_avg_sq"] + (1 - second) * gradients.square().mean(dim=1)
        root = (square / (1 - second**step)).sqrt() + self.eps
        rate = lr / ((1 - first**step) * root)
        return rows - rate.unsqueeze(1) * mean, {"exp_avg": mean, "exp_avg_sq": square, "step": step}


ROW_RULES: Registry[type[RowAdagrad] | type[RowAdam]] = Registry("rule for rows")
ROW_RULES.register("adagrad")(RowAdagrad)
ROW_RULES.register("adam")(RowAdam)

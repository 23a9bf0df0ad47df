"""The rows of a table in this process's memory, born at first use: the local ``RowSource``.

Invariant: a row exists once it was pulled, with the value that it would have anywhere else; its state is updated only
in steps that pushed a gradient for it, by a rule that servers use, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closeranks.core.protocols import RowRule
from closeranks.core.table_rows import initial_rows
from closeranks.models.table import row_bound


class LocalRows:
    """Rows with their state, in the order of their birth; ``ids`` finds them."""

    def __init__(self, key: int, dim: int, rule: RowRule, dtype: torch.dtype = torch.float32) -> None:
        self.dim = dim
        self._key = key
        self._rule = rule
        self._sorted = torch.empty(0, dtype=torch.int64)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0, dim, dtype=dtype)
        self._state = rule.init_state(self._rows)
        self._pushed: list[tuple[Tensor, Tensor]] = []

    @property
    def ids(self) -> Tensor:
        """The ids of all rows that exist, sorted."""
        return self._sorted

    def ask(self, ids: Tensor) -> None: ...

    def pull(self, ids: Tensor) -> Tensor:
        self._bear(ids)
        return self._rows[self._slots_of(ids)]

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        self._pushed.append((ids, gradients.detach().clone()))

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update the rows that gradients were pushed for, with ``scale`` times their sums."""
        if not self._pushed:
            return
        ids, gradients = summed(self._pushed)
        slots = self._slots_of(ids)
        state = {name: tensor[slots] for name, tensor in self._state.items()}
        rows, state = self._rule.update(self._rows[slots], state, gradients * scale, lr=lr)
        self._rows[slots] = rows
        for name, tensor in state.items():
            self._state[name][slots] = tensor
        self.discard()

    def discard(self) -> None:
        """Forget the gradients of a step that is not taken."""
        self._pushed.clear()

    def _slots_of(self, ids: Tensor) -> Tensor:
        return self._slots[torch.searchsorted(self._sorted, ids)]

    def _bear(self, ids: Tensor) -> None:
        fresh = ids[~torch.isin(ids, self._sorted)]
        if not len(fresh):
            return
        drawn = torch.from_numpy(initial_rows(self._key, fresh.numpy(), self.dim, row_bound(self.dim)))
        rows = drawn.to(self._rows.dtype)
        born = torch.arange(len(self._rows), len(self._rows) + len(fresh))
        merged, order = torch.cat([self._sorted, fresh]).sort()
        self._sorted, self._slots = merged, torch.cat([self._slots, born])[order]
        self._rows = torch.cat([self._rows, rows])
        self._state = {
            name: torch.cat([self._state[name], tensor]) for name, tensor in self._rule.init_state(rows).items()
        }


def summed(pushed: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Each id once, with the sum of its gradients."""
    ids = torch.cat([ids for ids, _ in pushed])
    gradients = torch.cat([gradients for _, gradients in pushed])
    distinct, places = torch.unique(ids, return_inverse=True)
    return distinct, gradients.new_zeros(len(distinct), gradients.shape[1]).index_add_(0, places, gradients)

"""Which rows does this rank keep? Those that were updated before, with their state, in the order of their birth.

A row exists from its first update on. Reading one that does not exist gives its first value and stores nothing, so an
evaluation leaves no trace. Invariant: what a row holds depends on its own gradients alone, whichever rank keeps it and
whichever other rows exist.

[Note: blocks] For snapshots and checkpoints rows are listed in blocks of a fixed number. A row never moves to another
block, so a block whose rows were not touched has the bytes that it had in the last checkpoint, which is then referred
to; frequent rows are born first, and lie together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from closeranks.core.protocols import RowRule
from closeranks.sync.rows.row_index import ABSENT, RowIndex

BLOCK_ROWS = 8192
KEYS, ROWS = "keys", "rows"
"""Columns that every store has, beside those of its rule's state."""
_GROWTH = 1.5


class RowGradients(NamedTuple):
    """Gradients [n, dim] of distinct keys [n]."""

    keys: Tensor
    values: Tensor


class RowStore:
    """Rows of one width, of any number of tables. ``first_rows``: the first values of the rows of these keys."""

    def __init__(self, dim: int, dtype: torch.dtype, rule: RowRule, first_rows: Callable[[Tensor], Tensor]) -> None:
        self.dim, self.dtype = dim, dtype
        self._rule, self._first_rows = rule, first_rows
        self.clear()

    def clear(self) -> None:
        self._index = RowIndex()
        rows = torch.empty(0, self.dim, dtype=self.dtype)
        self._columns = {KEYS: torch.empty(0, dtype=torch.int64), ROWS: rows, **self._rule.init_state(rows)}
        self._capacity = 0

    @property
    def num_rows(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Of rows and state, without the index."""
        return sum(column[:1].nbytes for column in self._columns.values()) * self.num_rows

    @property
    def version(self) -> tuple[int, int]:
        """Equal as long as ``blocks`` would list the same memory."""
        return self._capacity, self.num_rows

    def read(self, keys: Tensor) -> Tensor:
        """The rows of these keys, as a tensor of the caller's own."""
        slots = self._slots(keys)
        is_absent = slots == ABSENT
        if not is_absent.any():
            return self._columns[ROWS].index_select(0, slots)
        found = torch.empty(len(keys), self.dim, dtype=self.dtype)
        found[is_absent] = self._first_rows(keys[is_absent])
        found[~is_absent] = self._columns[ROWS].index_select(0, slots[~is_absent])
        return found

    def update(self, gradients: RowGradients, lr: float) -> None:
        """Apply one gradient to each of these rows; those that do not exist are born first."""
        if not len(gradients.keys):
            return
        fresh = gradients.keys[self._slots(gradients.keys) == ABSENT]
        if len(fresh):
            rows = self._first_rows(fresh)
            self.append({KEYS: fresh, ROWS: rows, **self._rule.init_state(rows)})
        slots = self._slots(gradients.keys)
        state = {name: self._columns[name].index_select(0, slots) for name in self.state_names}
        rows, after = self._rule.update(self._columns[ROWS].index_select(0, slots), state, gradients.values, lr=lr)
        for name, values in {ROWS: rows, **after}.items():
            self._columns[name].index_copy_(0, slots, values)

    def append(self, columns: Mapping[str, Tensor]) -> None:
        """Rows that do not exist yet, with their keys and state."""
        first, end = self.num_rows, self.num_rows + len(columns[KEYS])
        if end > self._capacity:
            self._grow(end)
        for name, values in columns.items():
            self._columns[name][first:end] = values
        self._index.add(columns[KEYS].numpy())

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """The columns block by block, as views; see [Note: blocks]."""
        for first in range(0, self.num_rows, BLOCK_ROWS):
            end = min(first + BLOCK_ROWS, self.num_rows)
            yield {name: column[first:end] for name, column in self._columns.items()}

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    @property
    def state_names(self) -> list[str]:
        return [name for name in self._columns if name not in (KEYS, ROWS)]

    def column_like(self, name: str) -> Tensor:
        """An empty tensor of a column's dtype and width."""
        return self._columns[name][:0]

    def _slots(self, keys: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(keys.numpy()))

    def _grow(self, needed: int) -> None:
        """The kernel gives memory to what is written, so spare capacity costs address space."""
        self._capacity = max(needed, BLOCK_ROWS, int(self._capacity * _GROWTH))
        for name, column in self._columns.items():
            grown = column.new_empty(self._capacity, *column.shape[1:])
            grown[: self.num_rows] = column[: self.num_rows]
            self._columns[name] = grown


def added(parts: Sequence[RowGradients], like: RowStore) -> RowGradients:
    """Each key once, with the sum of its gradients, added in the order of the parts."""
    if not parts:
        return RowGradients(torch.empty(0, dtype=torch.int64), torch.empty(0, like.dim, dtype=like.dtype))
    keys, places = torch.unique(torch.cat([part.keys for part in parts]), return_inverse=True)
    total = torch.zeros(len(keys), like.dim, dtype=like.dtype)
    for part, place in zip(parts, places.split([len(part.keys) for part in parts]), strict=True):
        total[place] += part.values  # a part has each key once
    return RowGradients(keys, total)

"""The tables of a model whose rows are kept outside it, and how each of them reads and pushes rows.

Every rank makes the same tables in the same order, so a row is named by one number: the number of its table and its id.
Tables of one width share a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.table_rows import ID_BITS, initial_rows


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table of the model."""

    number: int
    name: str
    dim: int
    key: int
    """Of the first values of its rows: ``core.table_rows.row_key``."""
    bound: float
    """Of those values."""


class RowExchange(Protocol):
    """How rows get to the model and gradients to whoever keeps the rows; the order of calls is that of
    ``core.protocols.RowSource``."""

    def ask(self, table: TableEntry, keys: Tensor) -> None: ...

    def pull(self, table: TableEntry, keys: Tensor) -> Tensor: ...

    def push(self, table: TableEntry, keys: Tensor, gradients: Tensor) -> None: ...


class TableRows:
    """The rows of one table, as the model sees them: a ``core.protocols.RowSource``. ``exchange`` is set before the
    first forward."""

    exchange: RowExchange

    def __init__(self, table: TableEntry) -> None:
        self.table, self.dim = table, table.dim

    def __deepcopy__(self, memo: object) -> Self:
        """A copy of a module reads the same rows."""
        return self

    def ask(self, ids: Tensor) -> None:
        self.exchange.ask(self.table, self._keys(ids))

    def pull(self, ids: Tensor) -> Tensor:
        return self.exchange.pull(self.table, self._keys(ids))

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        self.exchange.push(self.table, self._keys(ids), gradients.detach())

    def _keys(self, ids: Tensor) -> Tensor:
        return ids + (self.table.number << ID_BITS)


class TableList:
    """Notes the tables of a model while it is built."""

    def __init__(self) -> None:
        self.sources: list[TableRows] = []

    def add(self, name: str, rows: int, dim: int, key: int, bound: float) -> TableRows:
        if any(one.table.name == name for one in self.sources):
            raise ModelError(f"two tables of the model are named '{name}'", "Give each table a name of its own.")
        if rows > 1 << ID_BITS:
            raise ModelError(f"table '{name}' has more than 2^{ID_BITS} rows", "Give it fewer, or hashed=True.")
        self.sources.append(TableRows(TableEntry(len(self.sources), name, dim, key, bound)))
        return self.sources[-1]

    @property
    def tables(self) -> list[TableEntry]:
        return [one.table for one in self.sources]

    @property
    def dims(self) -> list[int]:
        """The widths of the stores."""
        return list(dict.fromkeys(table.dim for table in self.tables))

    def first_rows(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The first values of rows of one width."""
        numbers = (keys >> ID_BITS).numpy()
        ids = (keys & ((1 << ID_BITS) - 1)).numpy()
        tables = self.tables
        found = torch.empty(len(keys), tables[int(numbers[0])].dim, dtype=dtype)
        for number in np.unique(numbers):
            table, is_its = tables[int(number)], numbers == number
            drawn = initial_rows(table.key, ids[is_its], table.dim, table.bound)
            found[torch.from_numpy(is_its)] = torch.from_numpy(drawn).to(dtype)
        return found


def merged(tables: Sequence[TableEntry], keys: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of several tables of one width as one list of distinct keys."""
    all_keys, values = torch.cat(list(keys)), torch.cat(list(gradients))
    if len({table.number for table in tables}) == len(tables):
        return all_keys, values
    distinct, places = torch.unique(all_keys, return_inverse=True)  # a table was read twice in one micro-batch
    return distinct, values.new_zeros(len(distinct), values.shape[1]).index_add_(0, places, values)

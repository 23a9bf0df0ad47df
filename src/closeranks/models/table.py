"""An embedding table: how do ids become vectors, and which rows get a gradient?

A table either holds its rows as an ordinary parameter, which every layout of the data axis trains like any other, or
reads them from a ``RowSource``: then only the distinct rows of a micro-batch are pulled, and backward pushes one
gradient for each of them; no dense gradient exists. Invariant: both compute the same vectors and the same gradients,
and rows start with the same values (``core.table_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import RowSource
from closeranks.core.table_rows import initial_rows, row_key

Bag = Literal["sum", "none"]

SourceFactory = Callable[[str, int, int], RowSource]
"""Takes name, rows and dim of a table, and returns where its rows are kept."""
_factory: ContextVar[SourceFactory | None] = ContextVar("rows of tables", default=None)

_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplies ids before they are hashed; odd, so that no two ids meet here."""


@contextmanager
def rows_from(make: SourceFactory) -> Iterator[None]:
    """Tables that are made meanwhile keep their rows there, and have no parameter."""
    token = _factory.set(make)
    try:
        yield
    finally:
        _factory.reset(token)


class TableRead(NamedTuple):
    """A read that has begun."""

    places: Tensor
    """Ids, or where each is among the pulled rows."""
    distinct: Tensor | None
    """The ids that are pulled; None: the rows are the table's own."""


class Table(nn.Module):
    """``rows`` vectors of width ``dim``.

    Ids are whole numbers [...]; the vectors are [..., dim], or their sums over the last dim of the ids with
    ``bag="sum"``. Negative ids stand for no id, and add nothing. ``hashed``: ids may have any size, and several may
    share a row. With a ``source`` the table has no parameter of its own; ``rows_from`` gives every table one.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        bag: Bag = "none",
        *,
        hashed: bool = False,
        source: RowSource | None = None,
    ) -> None:
        super().__init__()
        if source is None and (make := _factory.get()) is not None:
            source = make(name, rows, dim)
        if source is not None and source.dim != dim:
            what = f"the rows of table '{name}' have {source.dim} values where they are kept, and {dim} in the model"
            raise ModelError(what, "Give both the same dim.")
        self.name, self.rows, self.dim, self.bag, self.hashed = name, rows, dim, bag, hashed
        self.source = source
        if source is None:
            self.weight = nn.Parameter(torch.empty(rows, dim))
            self.reset_parameters()
        else:
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Values that follow from torch's seed, the name and the row; nothing on the meta device."""
        if self.weight is not None and not self.weight.is_meta:
            fill_rows(self.weight, row_key(torch.initial_seed(), self.name))

    def forward(self, ids: Tensor) -> Tensor:
        return self.finish(self.begin(ids))

    def begin(self, ids: Tensor) -> TableRead:
        """Ask for the rows of these ids; ``finish`` waits for them."""
        if self.hashed:
            ids = torch.where(ids < 0, ids, hash_ids(ids, self.rows))
        if self.source is None or not _has_values(ids):
            return TableRead(ids, None)
        is_there = ids >= 0
        distinct, places = torch.unique(ids[is_there], return_inverse=True)
        if len(distinct) and distinct[-1] >= self.rows:
            what = f"the id {int(distinct[-1])} was looked up in table '{self.name}', which has {self.rows} rows"
            raise ModelError(what, "Give the table more rows, or hashed=True.")
        self.source.ask(distinct)
        # Places without an id read a row of zeros after the pulled ones.
        return TableRead(torch.full_like(ids, len(distinct)).masked_scatter_(is_there, places), distinct)

    def finish(self, read: TableRead) -> Tensor:
        vectors = self._own(read.places) if read.distinct is None else self._pulled(read.places, read.distinct)
        return vectors.sum(-2) if self.bag == "sum" else vectors

    def _own(self, ids: Tensor) -> Tensor:
        if self.weight is None:  # tracing a module without data: nobody has rows for it
            return torch.zeros(*ids.shape, self.dim, device=ids.device)
        return F.embedding(ids.clamp(min=0), self.weight) * (ids >= 0).unsqueeze(-1)

    def _pulled(self, places: Tensor, distinct: Tensor) -> Tensor:
        assert self.source is not None
        rows = pulled_rows(self.source, distinct)
        return F.embedding(places, torch.cat([rows, rows.new_zeros(1, self.dim)]))

    def extra_repr(self) -> str:
        return f"{self.name}, rows={self.rows}, dim={self.dim}, bag={self.bag}"


class Tables(nn.ModuleList):
    """Tables that are read together: rows that servers keep are pulled in one message to each server."""

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """``ids``: those of each table."""
        tables = cast("list[Table]", list(self))
        if any(table.source is None for table in tables):  # called as modules, for the hooks of those who shard weights
            return [table(one) for table, one in zip(tables, ids, strict=True)]
        begun = [table.begin(one) for table, one in zip(tables, ids, strict=True)]
        return [table.finish(read) for table, read in zip(tables, begun, strict=True)]


def tables_with_rows(module: nn.Module) -> list[str]:
    """Names of the tables in a module that hold their rows as a parameter."""
    return [one.name for one in module.modules() if isinstance(one, Table) and one.weight is not None]


def _has_values(ids: Tensor) -> bool:
    """False on the meta device, and where a module is traced without data."""
    return type(ids) is Tensor and not ids.is_meta


def pulled_rows(source: RowSource, ids: Tensor) -> Tensor:
    """Rows of distinct ids; backward pushes their gradients."""
    rows = source.pull(ids)
    if torch.is_grad_enabled():
        rows.requires_grad_().register_hook(lambda gradients: source.push(ids, gradients))
    return rows


def row_bound(dim: int) -> float:
    """Rows are drawn between minus this and this: vectors of length 0.6, whatever the width."""
    return 1.0 / math.sqrt(dim)


@torch.no_grad()
def fill_rows(weight: Tensor, key: int) -> None:
    """Every row with its first value."""
    step = max(1, (1 << 20) // max(weight.shape[1], 1))
    for part, ids in zip(weight.split(step), torch.arange(weight.shape[0]).split(step), strict=True):
        part.copy_(torch.from_numpy(initial_rows(key, ids.numpy(), weight.shape[1], row_bound(weight.shape[1]))))


def hash_ids(ids: Tensor, num_rows: int) -> Tensor:
    """Ids of any size as rows: a multiplication that wraps around, and its high bits."""
    mixed = ids.long() * _SPREAD
    return ((mixed ^ (mixed >> 32)) * _SPREAD >> 16) % num_rows

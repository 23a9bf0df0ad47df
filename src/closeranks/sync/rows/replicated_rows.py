"""Rows without servers: every data rank keeps all of them, and ranks exchange the gradients of touched rows.

Reading costs nothing, and a step broadcasts what each rank has pushed. Invariant: every rank adds the same gradients in
the same order as servers would, and so keeps the same rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import phase
from closeranks.core.traffic import count_sent
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.rows.row_messages import PUSH_PHASE
from closeranks.sync.rows.row_store import RowGradients, RowStore, added
from closeranks.sync.rows.table_rows import TableEntry, merged


class ReplicatedRows:
    """``stores``: one for each width. Call sequence: ``end_micro_batch`` after each backward, ``gradients`` once in a
    step, on all ranks."""

    def __init__(self, group: CommGroup, stores: Sequence[RowStore]) -> None:
        self._group, self._stores = group, {store.dim: store for store in stores}
        self._pending: list[tuple[TableEntry, Tensor, Tensor]] = []
        self._pushed: dict[int, list[RowGradients]] = {dim: [] for dim in self._stores}

    def ask(self, table: TableEntry, keys: Tensor) -> None: ...

    def pull(self, table: TableEntry, keys: Tensor) -> Tensor:
        return self._stores[table.dim].read(keys)

    def push(self, table: TableEntry, keys: Tensor, gradients: Tensor) -> None:
        self._pending.append((table, keys, gradients))

    def end_micro_batch(self, *, counts: bool) -> None:
        """``counts``: False where it is padding, whose gradients are dropped."""
        pending, self._pending = self._pending, []
        for dim, parts in self._pushed.items() if counts else ():
            own = [one for one in pending if one[0].dim == dim]
            if own:
                parts.append(RowGradients(*merged(*zip(*own, strict=True))))

    def gradients(self) -> list[RowGradients]:
        """Collective. Of each width: the sums of the step's pushes."""
        with phase(PUSH_PHASE):
            found = [added(self._gathered(store), store) for store in self._stores.values()]
        self._pushed = {dim: [] for dim in self._stores}
        return found

    def _gathered(self, store: RowStore) -> list[RowGradients]:
        """The pushes of all ranks, in the order of their ranks and micro-batches."""
        own = self._pushed[store.dim]
        if self._group.size == 1:
            return own
        parts = []
        for rank in range(self._group.size):
            is_own = rank == self._group.rank
            sizes = self._shared(
                torch.tensor([len(part.keys) for part in own] if is_own else [], dtype=torch.int64), rank
            )
            num_keys = int(sizes.sum())
            keys = (
                torch.cat([part.keys for part in own]) if is_own and own else torch.empty(num_keys, dtype=torch.int64)
            )
            values = torch.empty(num_keys, store.dim, dtype=store.dtype)
            if is_own and own:
                values = torch.cat([part.values for part in own])
            for tensor in (keys, values) if num_keys else ():
                self._broadcast(tensor, rank)
            split = sizes.tolist()
            parts += [RowGradients(*part) for part in zip(keys.split(split), values.split(split), strict=True)]
        return parts

    def _shared(self, numbers: Tensor, rank: int) -> Tensor:
        """A list of numbers of one rank, on all ranks."""
        count = torch.tensor([len(numbers)])
        self._broadcast(count, rank)
        shared = numbers if rank == self._group.rank else torch.empty(int(count), dtype=torch.int64)
        if int(count):
            self._broadcast(shared, rank)
        return shared

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        if rank == self._group.rank:
            count_sent(PUSH_PHASE, tensor.nbytes * (self._group.size - 1))
        dist.broadcast(tensor, group=self._group.process_group, group_src=rank)

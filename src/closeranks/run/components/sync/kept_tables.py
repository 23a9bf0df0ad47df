"""Embedding tables whose rows are kept outside the model, as a component: on servers, or on every data rank.

``sync.rows`` moves rows and gradients, ``optim.row_rules`` says how a row is updated. A row that had a gradient in a
step is updated after its verdict with its factor, so clipping, the loss scale and skipped steps are those of all
parameters: whoever keeps a row adds the square of its gradient to the ballot.

State: keys, rows and their state, in blocks ([Note: blocks] in ``sync.rows.row_store``) of each rank that keeps rows.
Any number of servers reads what another one wrote, and a run without servers does, too: each rank takes the rows that
are its own now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.capture.tensors import StateTensor
from closeranks.core.errors import CheckpointError, ConfigError, ModelError, Problem
from closeranks.core.pieces import Piece
from closeranks.core.seeds import derive_seed
from closeranks.core.table_rows import ID_BITS, row_key, row_owners
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.models.table import row_bound, rows_from, tables_with_rows
from closeranks.optim.norms import norm_squared
from closeranks.optim.optimizer import Optimizer
from closeranks.optim.row_rules import ROW_RULES
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.run.state.saved_state import MODEL, TABLES, SavedState
from closeranks.sync.rows.replicated_rows import ReplicatedRows
from closeranks.sync.rows.row_client import RowClient
from closeranks.sync.rows.row_messages import EVALUATION
from closeranks.sync.rows.row_server import RowServer
from closeranks.sync.rows.row_store import KEYS, RowGradients, RowStore
from closeranks.sync.rows.table_rows import TableList
from closeranks.sync.server.roles import roles

if TYPE_CHECKING:
    from closeranks.core.protocols import ModelSpec
    from closeranks.data.loading.batch_reader import LoadedBatch
    from closeranks.data.sampling.order import MicroBatch
    from closeranks.run.job.job import Job


class TableBuilder:
    """Gives the tables of a model that is being built their rows, if the job says so. ``tables``: what it found."""

    def __init__(self, job: Job, spec: ModelSpec, device: torch.device) -> None:
        # As torch's generator is seeded while a factory runs, from which a table with a parameter takes its rows.
        self._seed = job.run.seed if spec.builds_on_meta else derive_seed(job.run.seed, "init")
        self.tables = TableList()
        self._is_on = job.optim.tables.is_on
        if self._is_on and device.type != "cpu":
            what = "rows of tables are kept in the memory of the CPU"
            raise ConfigError([Problem("optim.tables.rule", what, 'Set it to "none", or run.device = "cpu".')])

    def building(self) -> AbstractContextManager[None]:
        if not self._is_on:
            return nullcontext()
        return rows_from(
            lambda name, rows, dim: self.tables.add(name, rows, dim, row_key(self._seed, name), row_bound(dim))
        )

    def check(self, module: nn.Module) -> None:
        """Called with the whole model."""
        if not self._is_on:
            return
        if own := tables_with_rows(module):
            what = f"table '{own[0]}' was made before the run, with all of its rows, and the job keeps rows elsewhere"
            raise ModelError(what, "Pass a function that makes the model, instead of the model.")
        if not self.tables.sources:
            what = "the model has no table (closeranks.models.table.Table) whose rows could be kept"
            raise ConfigError([Problem("optim.tables.rule", what, 'Set it to "none".')])


@dataclass(frozen=True, slots=True)
class _Part:
    """The ranks that keep rows: this one's number among them, and how many copies there are of what it keeps."""

    number: int
    count: int
    holder: int = 0
    num_holders: int = 1


class KeptTables(Component):
    """``optimizer``: of the other parameters, whose rates rows follow."""

    def __init__(self, context: RunContext, tables: TableList, optimizer: Optimizer, dtype: torch.dtype) -> None:
        self._context, self._tables, self._optimizer = context, tables, optimizer
        self._config, data = context.job.optim.tables, context.groups.data
        peak = context.job.optim.lr
        self._lr_ratio = 1.0 if self._config.lr is None else self._config.lr / peak if peak else 0.0
        self._roles = roles(context.job.sync, data.size)
        server = self._roles.server_rank(data.rank)
        self.stores: list[RowStore] = []
        self._part: _Part | None = None
        """None: this rank keeps no rows."""
        if not self._roles.num_servers:
            self._part = _Part(0, 1, data.rank, data.size)
        elif server is not None:
            self._part = _Part(server, self._roles.num_servers)
        if self._part is not None:
            rule = ROW_RULES[self._config.rule]()
            first_rows = _first_rows(tables, dtype)
            self.stores = [RowStore(dim, dtype, rule, first_rows) for dim in tables.dims]
        self._client: RowClient | None = None
        self._server: RowServer | None = None
        self._replicated: ReplicatedRows | None = None
        if not self._roles.num_servers:
            self._replicated = ReplicatedRows(data, self.stores)
        elif server is None:
            self._client = RowClient(data, self._roles, tables.dims, dtype)
        else:
            self._server = RowServer(data, self._roles, self.stores)
        if (exchange := self._replicated or self._client) is not None:
            for source in tables.sources:
                source.exchange = exchange
        self._num_left = 0
        """Micro-batches of this step whose backward is still to come."""
        self._counts = True
        self._gradients: list[RowGradients] = []

    # Phases of a step

    def loaded(self, index: int, batches: Sequence[LoadedBatch]) -> None:
        """A server serves the step here: until the workers have finished it, there is nothing else to wait for."""
        self._num_left = len(batches)
        if self._server is not None:
            self._context.step_timer.enter_phase(WorkerPhase.REDUCE)
            self._server.serve(index)
        elif self._client is not None:
            self._client.open(index)
            if not batches:
                self._client.finish()

    def before_backward(self, micro_batch: MicroBatch) -> None:
        self._counts = not micro_batch.is_padding

    def after_backward(self, weight: Tensor, scale: Tensor) -> None:
        self._num_left -= 1
        exchange = self._client or self._replicated
        if exchange is not None:
            exchange.end_micro_batch(counts=self._counts)
        if self._client is not None and not self._num_left:
            self._client.finish()

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if self._server is not None:
            self._gradients = self._server.gradients(index)
        elif self._replicated is not None:
            self._gradients = self._replicated.gradients()
        if self._part is not None and self._part.holder == 0:
            values = [one.values for one in self._gradients]
            ballot.norm_squared = ballot.norm_squared + norm_squared(values, self._context.device)

    def update(self, index: int, verdict: Verdict) -> None:
        gradients, self._gradients = self._gradients, []
        if not gradients or not verdict.taken:
            return
        factor = verdict.factor.item()
        rate = self._optimizer.lr(index) * self._optimizer.rate_scale * self._lr_ratio
        for store, one in zip(self.stores, gradients, strict=True):
            store.update(RowGradients(one.keys, one.values.mul_(factor)), rate)

    # Around an evaluation

    def before_evaluation(self) -> None:
        """Called last, since this component is the first in the list: a server leaves it after the last read."""
        if self._server is not None:
            self._server.serve(EVALUATION)
        elif self._client is not None:
            self._client.open(EVALUATION)

    def after_evaluation(self) -> None:
        if self._client is not None:
            self._client.finish()

    # State

    def tensors(self) -> Iterator[StateTensor]:
        """Keys are ``0-of-2/16/3/rows``: the part of the ranks that keep rows, the width, the block, the column."""
        if self._part is None:
            return
        part = self._part
        for store in self.stores:
            for number, block in enumerate(store.blocks()):
                for name, tensor in block.items():
                    key = f"{part.number}-of-{part.count}/{store.dim}/{number}/{name}"
                    piece = Piece.whole(key, tuple(tensor.shape))
                    yield StateTensor(TABLES, key, piece, tensor, holder=part.holder, num_holders=part.num_holders)

    def version(self) -> object:
        return [store.version for store in self.stores]

    def tree(self) -> Mapping[str, Any]:
        tables = self._tables.tables
        columns = {"names": [table.name for table in tables], "widths": [table.dim for table in tables]}
        return {"tables": {"rule": self._config.rule, **columns}}

    def check(self, saved: SavedState) -> None:
        found = saved.tree.get("tables")
        if not found:
            are_parameters = any(f"{one.table.name}.weight" in saved.shapes(MODEL) for one in self._tables.sources)
            what = "the saved state has tables as parameters" if are_parameters else "the saved state has no tables"
            raise CheckpointError(f"{what}, and this job keeps them as rows", 'Set optim.tables.rule = "none".')
        if found["rule"] != self._config.rule:
            what = f"the saved rows have the state of '{found['rule']}', the job's rule is '{self._config.rule}'"
            raise CheckpointError(what, "Set optim.tables.rule back, or start a new run.")
        here = {(table.name, table.dim) for table in self._tables.tables}
        if odd := sorted(here ^ set(zip(found["names"], found["widths"], strict=True))):
            where = "only this model" if odd[0] in here else "only the saved state"
            what = f"{where} has the table '{odd[0][0]}' of width {odd[0][1]}"
            raise CheckpointError(what, "Use the tables of the saved run, or start a new one.")

    def restore(self, saved: SavedState) -> None:
        for store in self.stores:
            store.clear()
        if self._part is None:
            return
        numbers = {name: number for number, name in enumerate(saved.tree["tables"]["names"])}
        renumbered = {numbers[table.name]: table.number for table in self._tables.tables}
        found = saved.shapes(TABLES)
        for store in self.stores:
            for place in _blocks_of(found, store.dim):
                self._restore_block(saved, store, place, found, renumbered)

    def _restore_block(
        self,
        saved: SavedState,
        store: RowStore,
        place: str,
        found: Mapping[str, tuple[int, ...]],
        renumbered: Mapping[int, int],
    ) -> None:
        """Take the rows of a saved block that are this rank's now."""
        assert self._part is not None

        def read(name: str) -> Tensor:
            key = f"{place}/{name}"
            return saved.read(TABLES, key, Piece.whole(key, found[key]), store.column_like(name).dtype)

        keys = read(KEYS)
        numbers_here = torch.tensor([renumbered[number] for number in range(len(renumbered))])
        keys = (keys & ((1 << ID_BITS) - 1)) + (numbers_here[keys >> ID_BITS] << ID_BITS)
        is_own = torch.from_numpy(row_owners(keys.numpy(), self._part.count) == self._part.number)
        if is_own.any():
            columns = {name: read(name)[is_own] for name in store.column_names if name != KEYS}
            store.append({KEYS: keys[is_own], **columns})


def _first_rows(tables: TableList, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda keys: tables.first_rows(keys, dtype)


def _blocks_of(found: Mapping[str, tuple[int, ...]], dim: int) -> list[str]:
    """The blocks of a width, in the order in which rows were born in each part."""
    places = [key.rpartition("/")[0] for key in found if key.endswith(f"/{KEYS}")]
    own = [place for place in places if place.split("/")[1] == str(dim)]
    return sorted(own, key=lambda place: (_part_number(place), int(place.rpartition("/")[2])))


def _part_number(place: str) -> int:
    return int(place.partition("-")[0])

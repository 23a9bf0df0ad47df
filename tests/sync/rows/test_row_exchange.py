"""Workers and a server that keeps rows, message by message: who comes first changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.errors import UserError
from closeranks.core.table_rows import row_key
from closeranks.core.traffic import take_sent
from closeranks.models.table import row_bound
from closeranks.optim.row_rules import RowAdagrad
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.rows.row_client import RowClient
from closeranks.sync.rows.row_messages import EVALUATION, PULL_PHASE, PUSH_PHASE
from closeranks.sync.rows.row_server import RowServer
from closeranks.sync.rows.row_store import RowStore
from closeranks.sync.rows.table_rows import TableList, TableRows
from closeranks.sync.server.roles import Roles
from closeranks.testing import run_world

pytestmark = pytest.mark.world

WIDTHS = (4, 2)
PUSHED = {0: (1e8, 1.0), 1: (-1e8, 3.0)}
"""By worker: the gradients of its two micro-batches, whose sum depends on their order."""


def table_list() -> TableList:
    tables = TableList()
    for number, dim in enumerate((4, 2, 4)):
        tables.add(f"t{number}", 1000, dim, row_key(1, f"t{number}"), row_bound(dim))
    return tables


def exchange(late: int) -> list[list[Tensor]] | dict[str, int]:
    """Two workers and a server. Worker ``late`` pushes only once the other one has finished. The server returns the
    sums of two steps, by width; a worker the bytes it sent in the second."""
    rank, roles, tables = dist.get_rank(), Roles(2, 1), table_list()
    group, store = RankGroup(rank, 3), dist.distributed_c10d._get_default_store()
    if rank == 2:
        stores = [
            RowStore(dim, torch.float32, RowAdagrad(), lambda keys: tables.first_rows(keys, torch.float32))
            for dim in WIDTHS
        ]
        server = RowServer(group, roles, stores)
        found: list[list[Tensor]] = []
        for step in range(2):
            server.serve(step)
            found.append([part.values for part in server.gradients(step)])
        server.serve(EVALUATION)
        dist.barrier()
        return found
    client = RowClient(group, roles, tables.dims, torch.float32)
    for source in tables.sources:
        source.exchange = client
    sent: dict[str, int] = {}
    for step in range(2):
        take_sent()
        client.open(step)
        if rank == late:
            store.wait([f"finished/{step}"])
        for gradient in PUSHED[rank]:
            micro_batch(client, tables.sources, gradient)
        client.finish()
        store.set(f"finished/{step}", "")
        sent = take_sent().num_bytes
    client.open(EVALUATION)
    assert tables.sources[0].pull(torch.tensor([7])).shape == (1, 4)
    client.finish()
    dist.barrier()
    with pytest.raises(UserError, match="'t1' were read between two steps"):
        tables.sources[1].pull(torch.tensor([7]))
    return sent


def micro_batch(client: RowClient, sources: list[TableRows], gradient: float) -> None:
    """Three tables of two widths, asked for together; the second is not used in the end."""
    ids = torch.tensor([1, 5, 9])
    for source in sources:
        source.ask(ids)
    for source in sources:
        rows = source.pull(ids)
        assert rows.shape == (3, source.dim)
        if source.dim == 4:
            source.push(ids, torch.full_like(rows, gradient))
    client.end_micro_batch(counts=True)
    sources[0].pull(ids)
    sources[0].push(ids, torch.full((3, 4), 1e6))
    client.end_micro_batch(counts=False)


def test_sums_do_not_depend_on_who_comes_first() -> None:
    first, second = run_world(exchange, 3, 0), run_world(exchange, 3, 1)
    for one, two in zip(first[2], second[2], strict=True):
        assert [part.shape for part in one] == [(6, 4), (0, 2)]
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert one[0].unique().tolist() == [3.0], "((1e8 + 1) - 1e8) + 3 in float32; the other order gives 0"
    header, keys = 8 * 4, 8 * 3
    pulls = 2 * (header + 3 * keys) + 2 * (header + keys)
    pushes = 2 * (header + 2 * keys + 2 * 3 * 4 * 4)
    assert first[0] == {PULL_PHASE: pulls, PUSH_PHASE: pushes}, "one message for all tables of a micro-batch"

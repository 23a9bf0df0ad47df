"""How does a worker read rows that servers keep, and send them gradients?

What was asked for is pulled when the first of it is needed: one message to each server that keeps any of it, for all
tables together. Gradients of a micro-batch are collected and sent after its backward, while the worker computes on.

Invariant: after the last micro-batch of a step every server is told so, and nothing is pulled until the next one opens:
a server answers only while it waits for workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.core.errors import UserError
from closeranks.core.phases import phase
from closeranks.core.table_rows import row_owners
from closeranks.core.traffic import count_sent
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.rows.row_messages import PULL_PHASE, PUSH_PHASE, RowHeader, RowVerb
from closeranks.sync.rows.table_rows import TableEntry, merged
from closeranks.sync.server.messages import (
    ROW_HEADER_TAG,
    ROW_KEYS_TAG,
    ROW_VALUES_TAG,
    Messages,
    receive,
    send,
)
from closeranks.sync.server.roles import Roles

_MAX_UNREAD = 4
"""Messages to a server whose memory is kept, since it may not have read them yet."""


@dataclass(slots=True)
class _Asked:
    table: TableEntry
    keys: Tensor
    rows: Tensor | None = None
    """None until they are pulled."""


class RowClient:
    """Call sequence: ``open`` a step, ``end_micro_batch`` after each backward, ``finish`` after the last; around an
    evaluation ``open(row_messages.EVALUATION)`` and ``finish``. ``group``: all data ranks; ``dims``: the widths."""

    def __init__(self, group: CommGroup, roles: Roles, dims: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._roles, self._dims, self._dtype = group, roles, list(dims), dtype
        self._step: int | None = None
        self._asked: list[_Asked] = []
        self._pushed: list[tuple[TableEntry, Tensor, Tensor]] = []
        self._sent: deque[Messages] = deque()

    def open(self, step: int) -> None:
        self._step = step

    def finish(self) -> None:
        """Nothing more is read or pushed in what was opened."""
        for server in range(self._roles.num_servers):
            self._say(server, RowVerb.FINISH, [0] * len(self._dims))
        self._asked.clear()
        self._step = None

    def ask(self, table: TableEntry, keys: Tensor) -> None:
        self._asked.append(_Asked(table, keys))

    def pull(self, table: TableEntry, keys: Tensor) -> Tensor:
        asked = self._find(table, keys)
        if asked is None:
            self.ask(table, keys)
            asked = self._asked[-1]
        if asked.rows is None:
            self._pull([one for one in self._asked if one.rows is None])
        self._asked = [one for one in self._asked if one is not asked]
        assert asked.rows is not None
        return asked.rows

    def push(self, table: TableEntry, keys: Tensor, gradients: Tensor) -> None:
        self._pushed.append((table, keys, gradients))

    def end_micro_batch(self, *, counts: bool) -> None:
        """Send its gradients; ``counts``: False where it is padding, whose gradients are dropped."""
        pushed, self._pushed = self._pushed, []
        self._asked.clear()
        if not pushed or not counts:
            return
        with phase(PUSH_PHASE):
            keys, values = zip(*(self._of_width(pushed, dim) for dim in self._dims), strict=True)
            for server, own in self._by_server(keys):
                parts = [one[places].view(-1) for one, places in zip(values, own, strict=True)]
                sent = self._say(server, RowVerb.PUSH, [len(places) for places in own], keys, own)
                flat = torch.cat(parts)
                works = send(flat, self._group, [self._rank_of(server)], ROW_VALUES_TAG)
                count_sent(PUSH_PHASE, sent + flat.nbytes)
                self._sent.append(Messages(works, [flat]))

    def _find(self, table: TableEntry, keys: Tensor) -> _Asked | None:
        same = (one for one in self._asked if one.table is table and torch.equal(one.keys, keys))
        return next(same, None)

    def _of_width(self, pushed: list[tuple[TableEntry, Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
        own = [one for one in pushed if one[0].dim == dim]
        if not own:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=self._dtype)
        tables, keys, gradients = zip(*own, strict=True)
        return merged(tables, keys, gradients)

    def _pull(self, wanted: list[_Asked]) -> None:
        if self._step is None:
            what = (
                f"rows of table '{wanted[0].table.name}' were read between two steps, when their servers do not answer"
            )
            raise UserError(what, "Read them in a step's micro-batches, or in an evaluation.")
        by_width = [[one for one in wanted if one.table.dim == dim] for dim in self._dims]
        keys = [torch.cat([one.keys for one in own]) if own else torch.empty(0, dtype=torch.int64) for own in by_width]
        rows = [torch.empty(len(one), dim, dtype=self._dtype) for one, dim in zip(keys, self._dims, strict=True)]
        with phase(PULL_PHASE):
            awaited = []
            for server, own in self._by_server(keys):
                counts = [len(places) for places in own]
                count_sent(PULL_PHASE, self._say(server, RowVerb.PULL, counts, keys, own))
                header = RowHeader(RowVerb.PULL, self._step, tuple(counts))
                reply = torch.empty(header.num_values(self._dims), dtype=self._dtype)
                work = receive(reply, self._group, self._rank_of(server), ROW_VALUES_TAG)
                awaited.append((header, own, reply, Messages([work])))
            for header, own, reply, message in awaited:
                message.wait()
                for target, places, values in zip(rows, own, header.rows_of(reply, self._dims), strict=True):
                    target[places] = values
        for width, asked in zip(rows, by_width, strict=True):
            for one, part in zip(asked, width.split([len(one.keys) for one in asked]), strict=True):
                one.rows = part.clone()

    def _by_server(self, keys: Sequence[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """For each server that keeps any of these rows: the places of its keys, by width."""
        num_servers = self._roles.num_servers
        owners = [torch.from_numpy(row_owners(one.numpy(), num_servers)) for one in keys]
        found = [(server, [(own == server).nonzero().view(-1) for own in owners]) for server in range(num_servers)]
        return [(server, places) for server, places in found if any(map(len, places))]

    def _say(
        self,
        server: int,
        verb: RowVerb,
        counts: Sequence[int],
        keys: Sequence[Tensor] = (),
        places: Sequence[Tensor] = (),
    ) -> int:
        """Send a header, and keys if there are any; returns the bytes of both."""
        assert self._step is not None
        while len(self._sent) > _MAX_UNREAD * self._roles.num_servers:
            self._sent.popleft().wait()
        header, rank = RowHeader(verb, self._step, tuple(counts)).encode(), [self._rank_of(server)]
        works, tensors = send(header, self._group, rank, ROW_HEADER_TAG), [header]
        if keys:
            tensors.append(torch.cat([one[at] for one, at in zip(keys, places, strict=True)]))
            works += send(tensors[-1], self._group, rank, ROW_KEYS_TAG)
        self._sent.append(Messages(works, tensors))
        return sum(tensor.nbytes for tensor in tensors)

    def _rank_of(self, server: int) -> int:
        return self._roles.num_workers + server

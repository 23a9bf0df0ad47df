"""How does a server answer workers that read rows, and add up what they push?

A server computes no micro-batch: it serves from the beginning of a step until every worker has finished its
micro-batches, and then goes on to the vote with all others. With ``mode = "stale"`` a worker may be ahead: its messages
of later steps are served, too, and its pushes wait for their step.

Invariant: the pushes of a step are added in the order of the workers' ranks and of their micro-batches, whatever order
they arrive in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from closeranks.core.phases import phase
from closeranks.core.traffic import count_sent
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.rows.row_messages import PULL_PHASE, SERVE_PHASE, RowHeader, RowVerb
from closeranks.sync.rows.row_store import RowGradients, RowStore, added
from closeranks.sync.server.messages import (
    ROW_HEADER_TAG,
    ROW_KEYS_TAG,
    ROW_VALUES_TAG,
    Messages,
    receive,
    send,
)
from closeranks.sync.server.roles import Roles

_Pushes = list[list[RowGradients]]
"""By width, in the order of the micro-batches."""


class RowServer:
    """``stores``: one for each width. Call sequence: ``serve`` a step, then ``gradients`` of it; in an evaluation
    ``serve(row_messages.EVALUATION)``."""

    def __init__(self, group: CommGroup, roles: Roles, stores: Sequence[RowStore]) -> None:
        self._group, self._roles, self._stores = group, roles, stores
        self._dims = [store.dim for store in stores]
        self._finished: dict[int, int] = {}
        """By step, or evaluation: how many workers have finished it."""
        self._pushed: dict[tuple[int, int], _Pushes] = {}
        """By step and worker."""
        self._sent: deque[Messages] = deque()

    def serve(self, step: int) -> None:
        with phase(SERVE_PHASE):
            while self._finished.get(step, 0) < self._roles.num_workers:
                self._answer()
        del self._finished[step]

    def gradients(self, step: int) -> list[RowGradients]:
        """Of each width: the sums of the step's pushes."""
        pushed = [self._pushed.pop((step, worker), None) for worker in range(self._roles.num_workers)]
        by_width = [
            [part for one in pushed if one is not None for part in one[number]] for number in range(len(self._stores))
        ]
        return [added(parts, store) for parts, store in zip(by_width, self._stores, strict=True)]

    def _answer(self) -> None:
        tensor = torch.empty(2 + len(self._dims), dtype=torch.int64)
        worker = dist.recv(tensor, group=self._group.process_group, tag=ROW_HEADER_TAG)
        header = RowHeader.decode(tensor)
        if header.verb is RowVerb.FINISH:
            self._finished[header.step] = self._finished.get(header.step, 0) + 1
            return
        keys = torch.empty(header.num_keys, dtype=torch.int64)
        works = [receive(keys, self._group, worker, ROW_KEYS_TAG)]
        values = torch.empty(header.num_values(self._dims), dtype=self._stores[0].dtype)
        if header.verb is RowVerb.PUSH:
            works.append(receive(values, self._group, worker, ROW_VALUES_TAG))
        Messages(works).wait()
        parts = zip(keys.split(list(header.counts)), header.rows_of(values, self._dims), strict=True)
        if header.verb is RowVerb.PUSH:
            pushes = self._pushed.setdefault((header.step, worker), [[] for _ in self._dims])
            for own, part in zip(pushes, parts, strict=True):
                own.append(RowGradients(*part))
            return
        for store, (own_keys, rows) in zip(self._stores, parts, strict=True):
            rows.copy_(store.read(own_keys))
        count_sent(PULL_PHASE, values.nbytes)
        self._sent.append(Messages(send(values, self._group, [worker], ROW_VALUES_TAG), [values]))
        while len(self._sent) > self._roles.num_workers:
            self._sent.popleft().wait()

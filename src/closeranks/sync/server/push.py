"""The push of one bucket: each worker's gradients to the slices of the servers.

[Note: posted ahead] A message is transmitted once its receiver has asked for it, so a server asks early: for the pushes
of ``bound`` steps beyond its own, the furthest that a worker can be ahead, but not beyond the next synchronization.
Invariant: a server adds pushes in the order of the workers' ranks, whatever order they arrive in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from closeranks.core.phases import TimedWork
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.core.traffic import count_sent
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.server.messages import Messages, receive, send
from closeranks.sync.server.roles import Roles

PHASE = "data.push"
LastStep = Callable[[int], int]
"""The last step before the next synchronization of all ranks, of a step; both count from 0."""


class PushReduction:
    """Reduces one bucket over the workers into the slice of each server. ``spec``: of the whole bucket."""

    num_collectives = 1

    def __init__(
        self, spec: FlatBufferSpec, group: CommGroup, roles: Roles, tag: int, bound: int, last_step: LastStep
    ) -> None:
        self._group, self._roles, self._tag = group, roles, tag
        self._slice = torch.empty(spec.numel // roles.num_servers, dtype=spec.dtype, device="meta")
        self._device = spec.device
        self._bound, self._last_step = bound, last_step
        self._is_server = roles.server_rank(group.rank) is not None
        self._step = 0
        self._posted = [dict[int, Messages]() for _ in range(roles.num_workers)]
        """By worker and step: what a server waits for."""
        self._next_step = [0] * roles.num_workers
        """By worker: the first step whose push was not asked for yet."""
        self.sent: deque[tuple[int, Messages]] = deque()
        """By step: what a worker has sent and not waited for."""
        self.pushed: Tensor | None = None
        """On a worker: the gradients of its latest push, as servers receive them."""

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._is_server:
            for worker in range(self._roles.num_workers):
                self.post(worker, step)
        while self.sent and self.sent[0][0] < step - self._bound:  # the server has applied these
            self.sent.popleft()[1].wait()

    def post(self, worker: int, step: int) -> None:
        """Ask for a worker's pushes of ``step`` and those after it, see [Note: posted ahead]."""
        end = min(step + self._bound, self._last_step(step)) + 1
        for number in range(max(step, self._next_step[worker]), end):
            self._posted[worker][number] = self._asked(worker, number)
            self._next_step[worker] = number + 1

    def _row(self, step: int) -> Tensor:
        """Where a worker's push of a step arrives."""
        return torch.empty_like(self._slice, device=self._device)

    def _asked(self, worker: int, step: int) -> Messages:
        row = self._row(step)
        return Messages([receive(row, self._group, worker, self._tag)], [row])

    def take(self, worker: int, step: int) -> Tensor:
        """Wait for one worker's push."""
        message = self._posted[worker].pop(step)
        message.wait()
        return message.tensors[0]

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        roles = self._roles
        if self._is_server:
            yield TimedWork(Messages(posted[self._step] for posted in self._posted), PHASE)
            arriving.copy_(self.take(0, self._step))
            for worker in range(1, roles.num_workers):
                arriving.add_(self.take(worker, self._step))
            return
        self._send(outgoing)
        if not self._bound:
            yield TimedWork(self.sent[-1][1], PHASE)

    def _send(self, outgoing: Tensor) -> None:
        """On a worker: to each server its slice."""
        self.pushed = outgoing
        count_sent(PHASE, outgoing.nbytes)
        works = [
            work
            for server, part in enumerate(outgoing.view(self._roles.num_servers, -1))
            for work in send(part, self._group, [self._roles.num_workers + server], self._tag)
        ]
        self.sent.append((self._step, Messages(works, [outgoing])))

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        raise NotImplementedError("servers own slices; nobody gets the whole sum")

    def commit(self, taken: Tensor) -> None: ...

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        return iter(())

    def compression_errors(self) -> Tensor | None:
        return None

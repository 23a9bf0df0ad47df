"""Backup workers: a step takes the first pushes that are complete, and leaves out the late ones.

See [Note: late pushes] in ``sync.server.decisions``. Every gradient that is taken was computed with the weights of its
own step, so training is synchronous; what a step is short of, its late workers' micro-batches, a later step takes
(``data.sampling.returned``). A worker that learns that a step was decided without it leaves off, takes the newest
weights and goes on with their step. Between synchronizations nobody waits for a late worker; at one, all ranks meet,
every push has arrived, and nothing is left in flight.

Invariants: a push is taken by all servers or by none; a worker never waits for a server before it has said that its
push is complete, since a server asks for a worker's next push only after it has heard of the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import phase
from closeranks.core.protocols import ReduceGroup
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.server.decisions import Decision, DecisionReceiver, Expected
from closeranks.sync.server.messages import (
    BALLOT_TAG,
    COUNT_TAG,
    DECISION_TAG,
    HEADER_TAG,
    Messages,
    receive,
    send,
)
from closeranks.sync.server.push import PHASE, PushReduction
from closeranks.sync.server.stale import StaleReducer

_MAX_VERSIONS = 8
"""Versions of the weights on their way to a worker that does not receive them, before servers wait for it."""


class BackupPush(PushReduction):
    """The push of one bucket. On a server one push of each worker is asked for at a time."""

    taken: Sequence[Tensor] = ()
    """What this step adds, in the order of the workers' ranks."""

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._is_server:
            for worker, posted in enumerate(self._posted):
                if not posted:
                    self.ask(worker)

    def ask(self, worker: int) -> None:
        """For the worker's next push."""
        self._posted[worker][0] = self._asked(worker, 0)

    def wait(self, worker: int) -> None:
        """For the worker's next push."""
        if not self._posted[worker]:
            self.ask(worker)
        self._posted[worker][0].wait()

    def take(self, worker: int, step: int = 0) -> Tensor:
        """The worker's next push, whatever its step."""
        self.wait(worker)
        return super().take(worker, 0)

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        if self._is_server:
            arriving.zero_()
            for one in self.taken:
                arriving.add_(one)
            self.taken = ()
            return
        self._send(outgoing)
        yield from ()


class BackupReducer(StaleReducer):
    """``expected`` and ``ballots`` are set before the first step."""

    expected: Callable[[int], Expected]
    ballots: BackupBallots
    push_kind = BackupPush
    _pushes: list[BackupPush]  # type: ignore[assignment]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, bound=0, **options)
        self._max_sent = _MAX_VERSIONS
        num_workers = self._roles.num_workers
        self._decisions = DecisionReceiver(self._next_decision)
        self._is_lead = self._server == 0
        self._num_seen = [0] * num_workers
        """On the lead server, by worker: pushes whose headers it has received."""
        self._num_read = [0] * num_workers
        """On a server, by worker: pushes that it has taken or dropped."""
        self._told: deque[Messages] = deque()
        """Decisions and headers that this rank has sent."""
        self.num_pushed = 0
        """Pushes that this worker has made."""
        self.has_pushed = False
        """Whether one was in this step."""
        self.decision = Decision(-1, (), ())
        """On the latest step."""

    @property
    def is_decided(self) -> bool:
        """On a worker: whether this step was decided already, without its push."""
        if self._server is not None or self.has_pushed:
            return False
        return self._decisions.newest >= self._step or self._receiver.taken > self._step

    def begin_step(self, step: int) -> None:
        if self._is_synchronized and self._server is None:
            self._decisions.expect(self._last_step(step) + 1 - step)
        self.has_pushed = False
        super().begin_step(step)

    def finish(self) -> None:
        """A server decides, or hears, what the step takes, and adds it. A worker pushes what it has computed in full;
        and before a synchronization it pushes in any case, so that servers ask for nothing in vain."""
        if self._server is not None:
            with phase(PHASE):
                self.decision = self._decide() if self._is_lead else self._next_decision()
                self._read_pushes(self.decision)
            super().finish()
            return
        self._is_complete = bool(self._last_of)
        if self._is_complete or self._step == self._last_step(self._step):
            super().finish()
            self.has_pushed = True
            self.num_pushed += 1

    def announce(self) -> None:
        """On a worker, after its push and its ballot are on their way, if there is a push. Then wait for the
        decision."""
        if self.has_pushed:
            header = torch.tensor([self._step, int(self._is_complete)], dtype=torch.int64)
            self._tell(header, [self._roles.num_workers], HEADER_TAG)
        with phase(PHASE):
            self.decision = self._decisions.wait(self._step)
        for push in self._pushes:  # servers have received what the lead server has seen
            while len(push.sent) > self.num_pushed - self.decision.num_seen[self._data.rank]:
                push.sent.popleft()[1].wait()

    def _decide(self) -> Decision:
        """On the lead server. Pushes of earlier steps that arrive meanwhile are dropped."""
        expected, taken = self.expected(self._step), set[int]()
        while len(taken) < expected.num_needed:
            worker, step, is_complete = self._next_header()
            if step == self._step and is_complete:
                taken.add(worker)
            else:
                self._drop(worker, asks_again=step != self._step)
        decision = Decision(self._step, tuple(sorted(taken)), tuple(self._num_seen))
        self._tell(decision.encode(), self._others(), DECISION_TAG)
        return decision

    def _next_header(self, worker: int | None = None) -> tuple[int, int, bool]:
        """Of a push that is complete here."""
        header = torch.empty(2, dtype=torch.int64)
        worker = dist.recv(header, worker, group=self._data.process_group, tag=HEADER_TAG)
        self._num_seen[worker] += 1
        for push in self._pushes:
            push.wait(worker)
        step, is_complete = header.tolist()
        return worker, step, bool(is_complete)

    def _read_pushes(self, decision: Decision) -> None:
        """Take what the decision takes, drop what came before it."""
        for worker, num_seen in enumerate(decision.num_seen):
            is_taken = worker in decision.taken
            while self._num_read[worker] < num_seen - is_taken:
                self._drop(worker)
        for push in self._pushes:
            push.taken = [push.take(worker) for worker in decision.taken]
        for worker in decision.taken:
            self._num_read[worker] += 1

    def _drop(self, worker: int, *, asks_again: bool = False) -> None:
        for push in self._pushes:
            push.take(worker)
            if asks_again:
                push.ask(worker)
        self._num_read[worker] += 1

    def _next_decision(self) -> Decision:
        tensor = torch.empty(1 + 2 * self._roles.num_workers, dtype=torch.int64)
        receive(tensor, self._data, self._roles.num_workers, DECISION_TAG).wait()
        return Decision.decode(tensor)

    def _synchronize(self) -> None:
        """Each worker says how often it has pushed, so that servers can receive the rest of it."""
        servers = range(self._roles.num_workers, self._data.size)
        if self._server is None:
            self._tell(torch.tensor([self.num_pushed]), servers, COUNT_TAG)
        else:
            for worker in range(self._roles.num_workers):
                count = torch.empty(1, dtype=torch.int64)
                receive(count, self._data, worker, COUNT_TAG).wait()
                self._read_rest(worker, int(count))
            self.ballots.read_rest(self._num_read)
        super()._synchronize()
        while self._told:
            self._told.popleft().wait()
        self.ballots.wait()

    def _read_rest(self, worker: int, count: int) -> None:
        while self._is_lead and self._num_seen[worker] < count:
            self._next_header(worker)
            self._drop(worker)
        while self._num_read[worker] < count:
            self._drop(worker)

    def _tell(self, tensor: Tensor, ranks: Sequence[int], tag: int) -> None:
        self._told.append(Messages(send(tensor, self._data, ranks, tag), [tensor]))


class BackupBallots:
    """The collective of the vote: the ballots of the workers whose pushes a step takes, and of the servers.

    A ballot goes with every push, and is dropped with it. ``servers``: on a server, all of them. What a dropped ballot
    asks for is kept in ``dropped``, for the next synchronization."""

    def __init__(self, reducer: BackupReducer, servers: ReduceGroup) -> None:
        self._reducer, self._servers = reducer, servers
        self._group, self._roles = reducer._data, reducer._roles
        self._is_server = self._roles.server_rank(self._group.rank) is not None
        self._num_read = [0] * self._roles.num_workers
        self._sent: deque[Messages] = deque()
        self._like = torch.empty(0)

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, tensor: Tensor) -> Tensor:
        reducer = self._reducer
        if not self._is_server:
            if reducer.has_pushed:
                servers, copy = range(self._roles.num_workers, self._group.size), tensor.clone()
                self._sent.append(Messages(send(copy, self._group, servers, BALLOT_TAG), [copy]))
            reducer.announce()
            return tensor
        self._like, decision = torch.empty_like(tensor), reducer.decision
        self._servers.sum(tensor)
        for worker, num_seen in enumerate(decision.num_seen):
            if (last := self._read_until(worker, num_seen)) is not None and worker in decision.taken:
                tensor.add_(last)
        return tensor

    def read_rest(self, num_pushed: Sequence[int]) -> None:
        """On a server, at a synchronization: all workers' pushes so far."""
        for worker, count in enumerate(num_pushed):
            self._read_until(worker, count)

    def wait(self) -> None:
        while self._sent:
            self._sent.popleft().wait()

    def _read_until(self, worker: int, count: int) -> Tensor | None:
        """The last of the worker's ballots up to its ``count``-th, if there is one that was not read."""
        last = None
        while self._num_read[worker] < count:
            last = torch.empty_like(self._like)
            receive(last, self._group, worker, BALLOT_TAG).wait()
            self._num_read[worker] += 1
        return last

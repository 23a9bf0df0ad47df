"""Ballots of workers that do not wait for each other: sent to the servers in every step, and added up there.

``sum`` is the collective of the vote between two synchronizations: a worker sends its ballot and goes on with what it
has; a server gets the sum of all workers' ballots of the step, and of the servers' own. Invariant: ballots are added in
the order of the workers' ranks.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from closeranks.core.protocols import ReduceGroup
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.server.messages import BALLOT_TAG, Messages, receive, send
from closeranks.sync.server.roles import Roles


class BallotExchange:
    """``group``: all data ranks; ``servers``: on a server, all of them; ``max_ahead``: steps that a worker may be ahead
    of the servers."""

    def __init__(self, group: CommGroup, roles: Roles, servers: ReduceGroup, max_ahead: int) -> None:
        self._group, self._roles, self._servers, self._max_ahead = group, roles, servers, max_ahead
        self._is_server = roles.server_rank(group.rank) is not None
        self._sent: deque[Messages] = deque()

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, tensor: Tensor) -> Tensor:
        workers = range(self._roles.num_workers)
        if not self._is_server:
            servers = range(self._roles.num_workers, self._group.size)
            copy = tensor.clone()
            self._sent.append(Messages(send(copy, self._group, servers, BALLOT_TAG), [copy]))
            while len(self._sent) > self._max_ahead + 1:
                self._sent.popleft().wait()
            return tensor
        ballots = torch.empty(len(workers), *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        Messages([receive(ballots[worker], self._group, worker, BALLOT_TAG) for worker in workers], [ballots]).wait()
        self._servers.sum(tensor)
        for ballot in ballots:
            tensor.add_(ballot)
        return tensor

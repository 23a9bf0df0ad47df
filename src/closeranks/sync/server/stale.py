"""Stale-synchronous training: workers go on without waiting for each other, within a bound.

[Note: bounded staleness] A worker may begin step ``k`` once it holds a version of the weights with at least ``k -
bound`` updates, and it takes the newest one that has arrived. Version ``v`` is what all workers' pushes of the first
``v`` steps made of the weights: a worker is therefore never more than ``bound`` steps ahead of the slowest. At a
synchronization (``last_step``) every rank waits for all updates, so all hold the same state, which can be saved and
restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from closeranks.core.phases import phase
from closeranks.core.protocols import LocalParameter
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.server.compressed_push import PushCompression
from closeranks.sync.server.messages import Messages
from closeranks.sync.server.push import LastStep
from closeranks.sync.server.reducer import PULL_PHASE, ServerReducer
from closeranks.sync.server.roles import Roles
from closeranks.sync.server.weights_receiver import WeightsReceiver


class StaleReducer(ServerReducer):
    """Stale-synchronous, see [Note: bounded staleness]; the update of step ``k`` is made once all pushes of it are
    there."""

    def __init__(
        self,
        held: Sequence[LocalParameter],
        group: CommGroup,
        roles: Roles,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        overlap: bool = True,
        bound: int,
        last_step: LastStep,
        compression: PushCompression | None = None,
    ) -> None:
        caps: dict[str, Any] = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        ahead: dict[str, Any] = {"bound": bound, "last_step": last_step, "compression": compression}
        super().__init__(held, group, roles, **caps, overlap=overlap, **ahead)
        self._bound, self._last_step, self._step = bound, last_step, -1
        self._receiver = WeightsReceiver([bucket.weights for bucket in self._buckets], self._next_version)
        self._sent: deque[Messages] = deque()
        """Versions that this server has sent."""
        self._max_sent = bound + 1
        self._is_synchronized = True

    @property
    def staleness(self) -> int:
        """How many of the updates before this step the weights lack that this worker computes it with."""
        return 0 if self._server is not None else self._step - self._receiver.taken

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._step = step
        if self._is_synchronized and self._server is None:
            self._receiver.expect(step, self._last_step(step) + 1)
        self._is_synchronized = False

    def gather_parameters(self) -> None:
        """A worker takes the newest weights, and waits where those would be too old; a server sends them."""
        is_sync_step = self._step == self._last_step(self._step)
        with phase(PULL_PHASE):
            if self._server is None:
                self._receiver.take(self._step + 1 - (0 if is_sync_step else self._bound))
            else:
                self._send_version()
            if is_sync_step:
                self._synchronize()

    def _send_version(self) -> None:
        self._sent.append(self._send_to(range(self._roles.num_workers), copies=True))
        while len(self._sent) > self._max_sent:
            self._sent.popleft().wait()

    def _synchronize(self) -> None:
        """All ranks have the same weights: servers exchange their slices, and nothing is left in flight."""
        self._is_synchronized = True
        for push in self._pushes:
            while push.sent:
                push.sent.popleft()[1].wait()
        while self._sent:
            self._sent.popleft().wait()
        if self._server is None:
            return
        first, others = self._roles.num_workers, range(self._roles.num_servers)
        works = [
            self._slices_of(server)
            if server != self._server
            else self._send_to([first + other for other in others if other != self._server])
            for server in others
        ]
        for one in works:
            one.wait()

    def _next_version(self, weights: Sequence[Tensor]) -> Messages:
        asked = [self._slices_of(server, weights) for server in range(self._roles.num_servers)]
        return Messages([work for one in asked for work in one.works], weights)

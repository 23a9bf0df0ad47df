"""Asynchronous training: a server makes an update of every single push.

[Note: applied on arrival] Pushes are applied in the order in which they arrive, and each is answered with the weights,
to the worker that sent it. A version of the weights counts the answers to one worker, and ``bound`` says for how many
of its own pushes it need not have waited. Nothing but the next synchronization bounds how far workers are apart.

Invariant: each push of each worker is applied once, in the order of its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import phase
from closeranks.sync.server.messages import HEADER_TAG, Messages, send
from closeranks.sync.server.push import PHASE
from closeranks.sync.server.stale import StaleReducer


@dataclass(frozen=True, slots=True)
class PushHeader:
    """What a worker says of its push: what an update needs besides the gradients."""

    step: int
    version: int
    """Of the weights that it computed with."""
    weight: float
    norm_squared: float
    """Of its own gradients; not finite if any of them, or its loss, is not."""

    def encode(self) -> Tensor:
        values = [self.step, self.version, self.weight, self.norm_squared]
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def decode(cls, tensor: Tensor) -> PushHeader:
        step, version, weight, norm_squared = tensor.tolist()
        return cls(int(step), int(version), weight, norm_squared)


Apply = Callable[[PushHeader, float], None]
"""Update this server's shards with the gradients of one push, which are in their ``.grad``. Takes its header and its
staleness: how many steps of updates its weights lacked."""


class AsynchronousReducer(StaleReducer):
    """See [Note: applied on arrival]. ``apply`` is set before the first step."""

    apply: Apply

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._headers: deque[Messages] = deque()
        """That this worker has sent."""
        self._next_steps = [0] * self._roles.num_workers
        """By worker: the step of its next push."""
        self._num_applied = 0
        self._applied_at: list[dict[int, int]] = [{} for _ in self._next_steps]
        """By worker and version: how many pushes its weights held."""
        self.stalenesses: list[float] = []
        """Of the pushes that were applied in this step."""

    def begin_step(self, step: int) -> None:
        if self._is_synchronized:
            self._next_steps = [step] * self._roles.num_workers
            self._applied_at = [{step: self._num_applied} for _ in self._next_steps]
        self.stalenesses = []
        super().begin_step(step)

    def send_header(self, weight: float, norm_squared: float) -> None:
        """On a worker, once its gradients are on their way."""
        header = PushHeader(self._step, self._receiver.taken, weight, norm_squared).encode()
        servers = range(self._roles.num_workers, self._data.size)
        self._headers.append(Messages(send(header, self._data, servers, HEADER_TAG), [header]))
        while len(self._headers) > self._bound + 1:
            self._headers.popleft().wait()

    def finish(self) -> None:
        """On a server: apply pushes as they arrive, until every worker's push of this step is among them."""
        if self._server is None:
            super().finish()
            return
        with phase(PHASE):
            while min(self._next_steps) <= self._step:
                header = torch.empty(4, dtype=torch.float64)
                worker = dist.recv(header, group=self._data.process_group, tag=HEADER_TAG)
                self._apply_push(worker, PushHeader.decode(header))

    def primary_gradients(self) -> Sequence[Tensor]:
        """A worker's own gradients, as it sent them: each push is clipped by itself."""
        return [push.pushed for push in self._pushes if push.pushed is not None]

    def _apply_push(self, worker: int, header: PushHeader) -> None:
        if header.step != self._next_steps[worker]:
            raise RuntimeError(f"worker {worker} pushed step {header.step} instead of {self._next_steps[worker]}")
        is_last = header.step == self._last_step(header.step)
        for bucket, push in zip(self._buckets, self._pushes, strict=True):
            bucket.gradient.copy_(push.take(worker, header.step))
            if not is_last:
                push.post(worker, header.step + 1)
        for shard, gradient in zip(self._parameter_shards, self._shard_gradients, strict=True):
            shard.tensor.grad = gradient
        staleness = (self._num_applied - self._applied_at[worker][header.version]) / self._roles.num_workers
        self.stalenesses.append(staleness)
        self.apply(header, staleness)
        for shard in self._parameter_shards:
            shard.tensor.grad = None
        self._num_applied += 1
        self._next_steps[worker] = header.step + 1
        applied_at = self._applied_at[worker]
        self._applied_at[worker] = {v: at for v, at in applied_at.items() if v >= header.version}
        self._applied_at[worker][header.step + 1] = self._num_applied
        if not is_last:
            self._sent.append(self._send_to([worker], copies=True))
        while len(self._sent) > self._roles.num_workers * (self._bound + 1):
            self._sent.popleft().wait()

    def _send_version(self) -> None:
        """Every push was answered already, but those before a synchronization: all get the same answer to these."""
        if self._step == self._last_step(self._step):
            super()._send_version()

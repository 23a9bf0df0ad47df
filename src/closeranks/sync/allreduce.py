"""How are gradients summed over the data ranks while backward is still running?

Each parameter's gradient is copied into its place in a flat bucket as soon as backward has produced it, and a bucket
leaves when it and all before it are full. Invariants: every rank issues the same collectives in the same order,
whatever it computed (a rank without a micro-batch sends zeros); accumulation communicates once per step, in its last
backward; a parameter that no sample used has gradient zero on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.sync.buckets import Bucket, Member, plan_buckets


class DataGroup(Protocol):
    """What the reducer needs to know of the group: ``parallel.group.Group`` is one."""

    @property
    def size(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


class _Flight:
    """One bucket's buffer, how many of its members are still missing this step, and the collective in flight."""

    def __init__(self, bucket: Bucket, parameters: dict[str, nn.Parameter]) -> None:
        self.members = [parameters[name] for name in bucket.names]
        first = self.members[0]
        self.buffer = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self.views = [
            _view(self.buffer, offset, parameter)
            for offset, parameter in zip(bucket.offsets, self.members, strict=True)
        ]
        self.missing = len(self.members)
        self.work: dist.Work | None = None


class AllReduce:
    """Bucketed all-reduce, overlapped with backward; see ``core.protocols.Reducer`` for the call sequence."""

    def __init__(self, module: nn.Module, group: DataGroup, *, bucket_bytes: int, first_bucket_bytes: int) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._group = group
        members = [Member(n, p.numel(), str(p.dtype), p.element_size()) for n, p in self._parameters.items()]
        self.plan = plan_buckets(
            members, num_ranks=group.size, cap_bytes=bucket_bytes, first_cap_bytes=first_bucket_bytes
        )
        self._flights = [_Flight(bucket, self._parameters) for bucket in self.plan]
        self._place = {p: (flight, i) for flight in self._flights for i, p in enumerate(flight.members)}
        self._armed = False
        self._next = 0
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def arm(self) -> None:
        self._armed = True

    def finish(self) -> None:
        """Send what backward did not fill, then wait. On CUDA the wait orders streams and does not stop the host."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for flight in self._flights:
            for parameter, view in zip(flight.members, flight.views, strict=True):
                if parameter.grad is not view:
                    self._place_gradient(parameter, view)
            flight.missing = 0
        self._launch_ready()
        for flight in self._flights:
            if flight.work is not None:
                flight.work.wait()

    def gradients(self) -> Sequence[Tensor]:
        if self._flights:
            return [flight.buffer for flight in self._flights]
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def release(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for flight in self._flights:
            flight.missing, flight.work = len(flight.members), None
        self._armed, self._next = False, 0

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        flight, index = self._place[parameter]  # type: ignore[index]
        if parameter.grad is flight.views[index]:
            what = "a parameter got its gradient twice in one backward, the second time after it had been sent"
            raise ModelError(what, "With torch.utils.checkpoint, set use_reentrant=False.")
        self._place_gradient(parameter, flight.views[index])
        flight.missing -= 1
        if flight.missing == 0:
            self._launch_ready()

    @staticmethod
    def _place_gradient(parameter: Tensor, view: Tensor) -> None:
        """Copying costs one pass; in return micro-batches accumulate at no cost and nothing is copied back."""
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view

    def _launch_ready(self) -> None:
        while self._next < len(self._flights) and self._flights[self._next].missing == 0:
            flight = self._flights[self._next]
            flight.work = dist.all_reduce(flight.buffer, group=self._group.process_group, async_op=True)
            self._next += 1


def _view(buffer: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A gradient with the parameter's own strides: fused optimizers walk both tensors in memory order."""
    return buffer.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), offset)

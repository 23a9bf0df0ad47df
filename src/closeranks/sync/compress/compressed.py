"""A reduction that is exact during warm-up and compressed afterwards, and that measures the compression error.

In sampled steps some values of the flat buffer are also summed exactly, beside the codes, and compared with the decoded
sum. The figures describe this step's gradient alone: error feedback from earlier steps makes them look worse than they
are, and what is lost now is sent later.

Invariant: which steps are exact and which are sampled follows from the step's number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.sync.held import DataGroup
from closeranks.sync.journeys import Journey
from closeranks.sync.places import Load
from closeranks.sync.ways import Flat

NUM_SAMPLED = 1 << 14
"""Values of a flat buffer that a sampled step sums exactly: 64 KiB."""


class Scheme(Protocol):
    """A reduction that always compresses: ``TwoShot`` and ``PowerSgd``."""

    num_legs: int

    def sum(self, flat: Tensor) -> Journey: ...

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey: ...

    def settle(self, taken: Tensor) -> None: ...

    def memory(self) -> Iterator[ErrorFeedbackTensor]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Which steps are exact and which are sampled; ``sample_every`` 0: none is sampled."""

    num_warmup: int = 0
    sample_every: int = 0

    def is_exact(self, step: int) -> bool:
        return step < self.num_warmup

    def is_sampled(self, step: int) -> bool:
        return not self.is_exact(step) and self.sample_every > 0 and step % self.sample_every == 0


class Compressed:
    """See ``ways.Way``."""

    def __init__(self, scheme: Scheme, group: DataGroup, load: Load, plan: Plan) -> None:
        self._scheme, self._group, self._plan = scheme, group, plan
        self._exact = Flat(group)
        self._stride = max(1, load.numel // NUM_SAMPLED)
        self._step = 0
        self._losses: Tensor | None = None
        self.num_legs = scheme.num_legs + 1

    def begin(self, step: int) -> None:
        self._step = step

    def sum(self, flat: Tensor) -> Journey:
        if self._plan.is_exact(self._step):
            yield from self._exact.sum(flat)
            return
        if not self._plan.is_sampled(self._step):
            yield from self._scheme.sum(flat)
            return
        exact = flat[:: self._stride].clone()
        yield from self._exact.sum(exact)
        yield from self._scheme.sum(flat)
        if self._group.rank == 0:  # all ranks hold the same
            self._compare(flat[:: self._stride], exact)

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey:
        if self._plan.is_exact(self._step):
            yield from self._exact.scatter(outgoing, arriving)
            return
        if not self._plan.is_sampled(self._step):
            yield from self._scheme.scatter(outgoing, arriving)
            return
        exact = outgoing.view(self._group.size, -1)[:, :: self._stride].clone(memory_format=torch.contiguous_format)
        yield from self._exact.sum(exact)
        yield from self._scheme.scatter(outgoing, arriving)
        self._compare(arriving[:: self._stride], exact[self._group.rank])

    def settle(self, taken: Tensor) -> None:
        self._scheme.settle(taken)

    def memory(self) -> Iterator[ErrorFeedbackTensor]:
        return self._scheme.memory()

    def losses(self) -> Tensor | None:
        found, self._losses = self._losses, None
        return found

    def _compare(self, ours: Tensor, exact: Tensor) -> None:
        a, b = ours.double(), exact.double()
        sums = torch.stack([(a - b).square().sum(), b.square().sum(), a.square().sum(), (a * b).sum()])
        self._losses = sums if self._losses is None else self._losses + sums

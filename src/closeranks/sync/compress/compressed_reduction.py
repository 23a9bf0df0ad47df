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
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.collectives.reductions import PlainReduction
from closeranks.sync.reducers.local_parameters import CommGroup

NUM_SAMPLED = 1 << 14
"""Values of a flat buffer that a sampled step sums exactly: 64 KiB."""


class CompressionScheme(Protocol):
    """A reduction that always compresses: ``TwoShot`` and ``PowerSgd``."""

    num_collectives: int

    def all_reduce(self, flat: Tensor) -> AsyncReduction: ...

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction: ...

    def commit(self, taken: Tensor) -> None: ...

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]: ...


@dataclass(frozen=True, slots=True)
class CompressionSchedule:
    """Which steps are exact and which are sampled; ``sample_every`` 0: none is sampled."""

    num_warmup: int = 0
    sample_every: int = 0

    def is_exact(self, step: int) -> bool:
        return step < self.num_warmup

    def is_sampled(self, step: int) -> bool:
        return not self.is_exact(step) and self.sample_every > 0 and step % self.sample_every == 0


class CompressedReduction:
    """See ``reductions.FlatReduction``."""

    def __init__(
        self, scheme: CompressionScheme, group: CommGroup, spec: FlatBufferSpec, plan: CompressionSchedule
    ) -> None:
        self._scheme, self._group, self._plan = scheme, group, plan
        self._exact = PlainReduction(group)
        self._stride = max(1, spec.numel // NUM_SAMPLED)
        self._step = 0
        self._errors: Tensor | None = None
        self.num_collectives = scheme.num_collectives + 1

    def begin_step(self, step: int) -> None:
        self._step = step

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        if self._plan.is_exact(self._step):
            yield from self._exact.all_reduce(flat)
            return
        if not self._plan.is_sampled(self._step):
            yield from self._scheme.all_reduce(flat)
            return
        exact = flat[:: self._stride].clone()
        yield from self._exact.all_reduce(exact)
        yield from self._scheme.all_reduce(flat)
        if self._group.rank == 0:  # all ranks hold the same
            self._compare(flat[:: self._stride], exact)

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        if self._plan.is_exact(self._step):
            yield from self._exact.reduce_scatter(outgoing, arriving)
            return
        if not self._plan.is_sampled(self._step):
            yield from self._scheme.reduce_scatter(outgoing, arriving)
            return
        exact = outgoing.view(self._group.size, -1)[:, :: self._stride].clone(memory_format=torch.contiguous_format)
        yield from self._exact.all_reduce(exact)
        yield from self._scheme.reduce_scatter(outgoing, arriving)
        self._compare(arriving[:: self._stride], exact[self._group.rank])

    def commit(self, taken: Tensor) -> None:
        self._scheme.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        return self._scheme.error_feedback()

    def compression_errors(self) -> Tensor | None:
        found, self._errors = self._errors, None
        return found

    def _compare(self, ours: Tensor, exact: Tensor) -> None:
        a, b = ours.double(), exact.double()
        sums = torch.stack([(a - b).square().sum(), b.square().sum(), a.square().sum(), (a * b).sum()])
        self._errors = sums if self._errors is None else self._errors + sums

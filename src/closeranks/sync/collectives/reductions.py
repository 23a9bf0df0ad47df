"""Reductions of one flat tensor over ranks: plain, hierarchical, or compressed.

A ``FlatReduction`` belongs to one flat buffer and all-reduces it in place, or reduce-scatters it. ``PlainReduction`` is
torch's own collective. ``HierarchicalReduction`` is hierarchical: reduce-scatter inside each host, all-reduce across
hosts between ranks with the same local index, all-gather inside. Each rank sends only its slice between hosts, once.
That may be compressed.

Call sequence: ``begin_step`` with every step's number; ``all_reduce`` or ``reduce_scatter``, as often as the step
needs; ``commit`` once it is known whether the step was taken. Invariant: after ``all_reduce`` all ranks hold the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import TimedWork
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.core.traffic import count_collective
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.collectives.torch_compat import all_gather_flat, reduce_scatter_flat
from closeranks.sync.reducers.local_parameters import CommGroup


class FlatReduction(Protocol):
    num_collectives: int
    """The largest number of collectives that one reduction takes."""

    def begin_step(self, step: int) -> None: ...

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        """All-reduce in place."""
        ...

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        """Reduce-scatter: this rank's slice of the sum into ``arriving``; ``outgoing`` is garbage afterwards."""
        ...

    def commit(self, taken: Tensor) -> None:
        """Commit this step's error feedback where ``taken`` is 1, discard it where it is 0."""
        ...

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]: ...

    def compression_errors(self) -> Tensor | None:
        """The compression error that this rank measured of its own part in this step: squared norms of the error, of
        the exact sum and of ours, and the dot product of the two; None where nothing was measured. Cleared when read.
        """
        ...


ReductionFactory = Callable[[FlatBufferSpec], FlatReduction]


class CompressibleReducer:
    """A reducer's access to the error feedback and the measured errors of its reductions."""

    def _reductions(self) -> Iterable[FlatReduction]:
        raise NotImplementedError

    def commit(self, taken: Tensor) -> None:
        for reduction in self._reductions():
            reduction.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        for reduction in self._reductions():
            yield from reduction.error_feedback()

    def compression_errors(self) -> list[Tensor]:
        return [found for reduction in self._reductions() if (found := reduction.compression_errors()) is not None]


class PlainReduction:
    """One torch collective over all ranks of a group."""

    num_collectives = 1

    def __init__(self, group: CommGroup) -> None:
        self._group = group

    def begin_step(self, step: int) -> None: ...

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        if self._group.size > 1:
            count_collective("data", "all-reduce", self._group.size, flat)
            work = dist.all_reduce(flat, group=self._group.process_group, async_op=True)
            assert work is not None
            yield TimedWork(work, "data.all_reduce")

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        if self._group.size > 1:
            count_collective("data", "reduce-scatter", self._group.size, outgoing)
            work = reduce_scatter_flat(arriving, outgoing, group=self._group.process_group, async_op=True)
            yield TimedWork(work, "data.reduce_scatter")
        else:
            arriving.copy_(outgoing)

    def commit(self, taken: Tensor) -> None: ...

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        return iter(())

    def compression_errors(self) -> Tensor | None:
        return None


def plain_reductions(group: CommGroup) -> ReductionFactory:
    return lambda spec: PlainReduction(group)


class HierarchicalReduction:
    """Hierarchical: inside the host, across hosts, inside the host. ``inside`` are the ranks of this host, ``across``
    one of every host; the flat buffer divides evenly among those inside."""

    def __init__(self, spec: FlatBufferSpec, inside: CommGroup, across: ReductionFactory) -> None:
        self._inside, share = inside, spec.numel // inside.size
        own = spec.slice(share * inside.rank, share * (inside.rank + 1))
        self._slice = torch.empty(share, dtype=spec.dtype, device=spec.device)
        self._across = across(own)
        self.num_collectives = 2 + self._across.num_collectives

    def begin_step(self, step: int) -> None:
        self._across.begin_step(step)

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        group = self._inside.process_group
        count_collective("data", "reduce-scatter", self._inside.size, flat)
        yield TimedWork(reduce_scatter_flat(self._slice, flat, group=group, async_op=True), "data.reduce_scatter")
        yield from self._across.all_reduce(self._slice)
        count_collective("data", "all-gather", self._inside.size, flat)
        yield TimedWork(all_gather_flat(flat, self._slice, group=group, async_op=True), "data.all_gather")

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        raise NotImplementedError("a sum of two levels reaches every rank")

    def commit(self, taken: Tensor) -> None:
        self._across.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        return self._across.error_feedback()

    def compression_errors(self) -> Tensor | None:
        return self._across.compression_errors()

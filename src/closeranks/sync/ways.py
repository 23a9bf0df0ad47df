"""Reductions of one flat tensor over ranks: plain, hierarchical, or compressed.

A ``Way`` belongs to one flat buffer and all-reduces it in place, or reduce-scatters it. ``Flat`` is torch's own
collective. ``TwoLevels`` is hierarchical: reduce-scatter inside each host, all-reduce across hosts between ranks with
the same local index, all-gather inside. Each rank sends only its slice between hosts, once. That may be compressed.

Call sequence: ``begin`` with every step's number; ``sum`` or ``scatter``, as often as the step needs; ``settle`` once
it is known whether the step was taken. Invariant: after ``sum`` all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.sync.collectives import gather_flat, reduce_flat
from closeranks.sync.held import DataGroup
from closeranks.sync.journeys import Journey
from closeranks.sync.places import Load


class Way(Protocol):
    num_legs: int
    """The largest number of collectives that one reduction takes."""

    def begin(self, step: int) -> None: ...

    def sum(self, flat: Tensor) -> Journey:
        """All-reduce in place."""
        ...

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey:
        """Reduce-scatter: this rank's slice of the sum into ``arriving``; ``outgoing`` is garbage afterwards."""
        ...

    def settle(self, taken: Tensor) -> None:
        """Commit this step's error feedback where ``taken`` is 1, discard it where it is 0."""
        ...

    def memory(self) -> Iterator[ErrorFeedbackTensor]: ...

    def losses(self) -> Tensor | None:
        """The compression error that this rank measured of its own part in this step: squared norms of the error, of
        the exact sum and of ours, and the dot product of the two; None where nothing was measured. Cleared when read.
        """
        ...


WayMaker = Callable[[Load], Way]


class OnWays:
    """A reducer's access to the error feedback and the measured errors of its reductions."""

    def _ways(self) -> Iterable[Way]:
        raise NotImplementedError

    def settle(self, taken: Tensor) -> None:
        for way in self._ways():
            way.settle(taken)

    def memory(self) -> Iterator[ErrorFeedbackTensor]:
        for way in self._ways():
            yield from way.memory()

    def losses(self) -> list[Tensor]:
        return [found for way in self._ways() if (found := way.losses()) is not None]


class Flat:
    """One torch collective over all ranks of a group."""

    num_legs = 1

    def __init__(self, group: DataGroup) -> None:
        self._group = group

    def begin(self, step: int) -> None: ...

    def sum(self, flat: Tensor) -> Journey:
        if self._group.size > 1:
            work = dist.all_reduce(flat, group=self._group.process_group, async_op=True)
            assert work is not None
            yield work

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey:
        if self._group.size > 1:
            yield reduce_flat(arriving, outgoing, group=self._group.process_group, async_op=True)
        else:
            arriving.copy_(outgoing)

    def settle(self, taken: Tensor) -> None: ...

    def memory(self) -> Iterator[ErrorFeedbackTensor]:
        return iter(())

    def losses(self) -> Tensor | None:
        return None


def flat_ways(group: DataGroup) -> WayMaker:
    return lambda load: Flat(group)


class TwoLevels:
    """Hierarchical: inside the host, across hosts, inside the host. ``inside`` are the ranks of this host, ``across``
    one of every host; the flat buffer divides evenly among those inside."""

    def __init__(self, load: Load, inside: DataGroup, across: WayMaker) -> None:
        self._inside, share = inside, load.numel // inside.size
        own = load.slice(share * inside.rank, share * (inside.rank + 1))
        self._slice = torch.empty(share, dtype=load.dtype, device=load.device)
        self._across = across(own)
        self.num_legs = 2 + self._across.num_legs

    def begin(self, step: int) -> None:
        self._across.begin(step)

    def sum(self, flat: Tensor) -> Journey:
        group = self._inside.process_group
        yield reduce_flat(self._slice, flat, group=group, async_op=True)
        yield from self._across.sum(self._slice)
        yield gather_flat(flat, self._slice, group=group, async_op=True)

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey:
        raise NotImplementedError("a sum of two levels reaches every rank")

    def settle(self, taken: Tensor) -> None:
        self._across.settle(taken)

    def memory(self) -> Iterator[ErrorFeedbackTensor]:
        return self._across.memory()

    def losses(self) -> Tensor | None:
        return self._across.losses()

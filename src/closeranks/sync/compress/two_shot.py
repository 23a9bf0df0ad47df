"""How is a sum made of codes?

[Note: two shots] Each rank owns an equal slice of the load. First every rank sends each other owner its code of that
slice, and the owner adds what they mean to its own part, which is never coded, in full precision and in the order of
ranks. Then the owner sends its code of the sum to all. What a code loses is remembered where it was lost, by the sender
(``residual``) and by the owner (``owed``), and sent with the next. Codes are never added: no type is too narrow for a
sum. A rank sends and receives ``2 (n - 1) / n`` codes of the load, as a ring does of the load itself.

Where the sum is wanted in slices (ZeRO), the first shot is all there is.

Invariant: all ranks decode the same bytes, so all hold the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from closeranks.core.protocols import Remembered
from closeranks.sync.compress.codec import Codec
from closeranks.sync.held import DataGroup
from closeranks.sync.journeys import Journey
from closeranks.sync.memory import OWED, RESIDUAL, Memory, in_rows
from closeranks.sync.places import Load
from closeranks.sync.swaps import gather, swap


class TwoShot:
    """A load that divides evenly among the ranks of a group; ``feedback``: whether what is lost is remembered."""

    num_legs = 2

    def __init__(self, codec: Codec, group: DataGroup, load: Load, *, feedback: bool, scatters: bool) -> None:
        self._codec, self._group, self._load = codec, group, load
        self._share = load.numel // group.size
        first = self._share * group.rank
        self._own = load.slice(first, first + self._share)
        sides = slice(0, group.rank), slice(group.rank + 1, group.size)
        self._others = [side for side in sides if side.start < side.stop]
        """The rows of other ranks: those before this one's and those after it."""
        self._residual = _zeros(load) if feedback else None
        self._owed = _zeros(self._own) if feedback and not scatters else None

    def sum(self, flat: Tensor) -> Journey:
        rows, rank = flat.view(self._group.size, -1), self._group.rank
        yield from self._collect(rows)
        own = rows[rank : rank + 1]
        if self._owed is not None:
            own.add_(self._owed.read())
        code = self._codec.encode(own)
        meant = self._codec.decode(code, self._share, flat.dtype)
        if self._owed is not None:
            torch.sub(own, meant, out=self._owed.draft().view_as(own))
            self._own.clear_gaps(self._owed.draft())
        own.copy_(meant)
        codes = torch.empty(self._group.size, code.shape[1], dtype=torch.uint8, device=flat.device)
        yield gather(codes, code.view(-1), self._group)
        for others in self._others:
            rows[others] = self._codec.decode(codes[others], self._share, flat.dtype)
        self._load.clear_gaps(flat)

    def scatter(self, outgoing: Tensor, arriving: Tensor) -> Journey:
        rows = outgoing.view(self._group.size, -1)
        yield from self._collect(rows)
        arriving.copy_(rows[self._group.rank])

    def _collect(self, rows: Tensor) -> Journey:
        """The sum of this rank's slice, in its row; the other rows lose their meaning."""
        if self._residual is not None:
            rows.add_(self._residual.read().view_as(rows))
        codes = [self._codec.encode(rows[others]) for others in self._others]
        if self._residual is not None:
            self._remember(rows, codes, self._residual)
        outgoing = codes[0] if len(codes) == 1 else torch.cat(codes)
        arrived = torch.empty_like(outgoing)
        yield swap(arrived, outgoing, self._group)
        own = rows[self._group.rank]
        for part in self._codec.decode(arrived, self._share, rows.dtype):
            own.add_(part)
        self._own.clear_gaps(own)

    def _remember(self, rows: Tensor, codes: Sequence[Tensor], memory: Memory) -> None:
        """What codes lose of the rows."""
        lost = memory.draft().view_as(rows)
        lost[self._group.rank] = 0.0
        for others, code in zip(self._others, codes, strict=True):
            torch.sub(rows[others], self._codec.decode(code, self._share, rows.dtype), out=lost[others])
        self._load.clear_gaps(memory.draft())

    def settle(self, taken: Tensor) -> None:
        for memory in (self._residual, self._owed):
            if memory is not None:
                memory.settle(taken)

    def memory(self) -> Iterator[Remembered]:
        if self._residual is not None:
            yield from in_rows(RESIDUAL, self._residual.kept, self._load, self._group.rank, self._group.size)
        if self._owed is not None:
            yield from in_rows(OWED, self._owed.kept, self._own, 0, 1)


def _zeros(load: Load) -> Memory:
    return Memory(torch.zeros(load.numel, dtype=load.dtype, device=load.device))

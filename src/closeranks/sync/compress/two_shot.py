"""Two-shot all-reduce of compressed data: an all-to-all of codes, then an all-gather of compressed sums.

[Note: two shots] Each rank owns an equal slice of the flat buffer. First every rank sends each other owner its code of
that slice, and the owner adds the decoded values to its own part, which is never encoded, in full precision and in rank
order. Then the owner sends its code of the sum to all. The error of a code is kept where it arises, by the sender
(``residual``) and by the owner (``owed``), and is added to what is sent next. Codes themselves are never added, so no
type is too narrow for a sum. A rank sends and receives ``2 (n - 1) / n`` codes of the buffer, as a ring all-reduce does
of the buffer itself.

Where only slices of the sum are needed (ZeRO), the first shot is enough.

Invariant: all ranks decode the same bytes, so all hold the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from closeranks.core.phases import TimedWork
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.core.traffic import count_collective, count_sent
from closeranks.sync.collectives.all_to_all import all_gather, all_to_all
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.error_feedback import OWED, RESIDUAL, StagedTensor, error_feedback_rows
from closeranks.sync.reducers.local_parameters import CommGroup


class TwoShot:
    """The flat buffer must divide evenly among the ranks of the group; ``feedback``: whether errors are kept."""

    num_collectives = 2

    def __init__(self, codec: Codec, group: CommGroup, spec: FlatBufferSpec, *, feedback: bool, scatters: bool) -> None:
        self._codec, self._group, self._spec = codec, group, spec
        self._share = spec.numel // group.size
        first = self._share * group.rank
        self._own = spec.slice(first, first + self._share)
        sides = slice(0, group.rank), slice(group.rank + 1, group.size)
        self._others = [side for side in sides if side.start < side.stop]
        """The rows of other ranks: those before this rank's and those after it."""
        self._residual = _zeros(spec) if feedback else None
        self._owed = _zeros(self._own) if feedback and not scatters else None

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        rows, rank = flat.view(self._group.size, -1), self._group.rank
        yield from self._collect(rows)
        own = rows[rank : rank + 1]
        if self._owed is not None:
            own.add_(self._owed.read())
        code = self._codec.encode(own)
        meant = self._codec.decode(code, self._share, flat.dtype)
        if self._owed is not None:
            torch.sub(own, meant, out=self._owed.staged().view_as(own))
            self._own.zero_padding(self._owed.staged())
        own.copy_(meant)
        codes = torch.empty(self._group.size, code.shape[1], dtype=torch.uint8, device=flat.device)
        count_collective("data", "all-gather", self._group.size, codes)
        yield TimedWork(all_gather(codes, code.view(-1), self._group), "data.all_gather")
        for others in self._others:
            rows[others] = self._codec.decode(codes[others], self._share, flat.dtype)
        self._spec.zero_padding(flat)

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        rows = outgoing.view(self._group.size, -1)
        yield from self._collect(rows)
        arriving.copy_(rows[self._group.rank])

    def _collect(self, rows: Tensor) -> AsyncReduction:
        """Sum this rank's slice into its row; the other rows are garbage afterwards."""
        if self._residual is not None:
            rows.add_(self._residual.read().view_as(rows))
        codes = [self._codec.encode(rows[others]) for others in self._others]
        if self._residual is not None:
            self._store_error(rows, codes, self._residual)
        outgoing = codes[0] if len(codes) == 1 else torch.cat(codes)
        arrived = torch.empty_like(outgoing)
        count_sent("data.all_to_all", outgoing.nbytes)
        yield TimedWork(all_to_all(arrived, outgoing, self._group), "data.all_to_all")
        own = rows[self._group.rank]
        for part in self._codec.decode(arrived, self._share, rows.dtype):
            own.add_(part)
        self._own.zero_padding(own)

    def _store_error(self, rows: Tensor, codes: Sequence[Tensor], residual: StagedTensor) -> None:
        """Store the compression error of the rows."""
        lost = residual.staged().view_as(rows)
        lost[self._group.rank] = 0.0
        for others, code in zip(self._others, codes, strict=True):
            torch.sub(rows[others], self._codec.decode(code, self._share, rows.dtype), out=lost[others])
        self._spec.zero_padding(residual.staged())

    def commit(self, taken: Tensor) -> None:
        for staged in (self._residual, self._owed):
            if staged is not None:
                staged.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        if self._residual is not None:
            yield from error_feedback_rows(
                RESIDUAL, self._residual.committed, self._spec, self._group.rank, self._group.size
            )
        if self._owed is not None:
            yield from error_feedback_rows(OWED, self._owed.committed, self._own, 0, 1)


def _zeros(spec: FlatBufferSpec) -> StagedTensor:
    return StagedTensor(torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device))

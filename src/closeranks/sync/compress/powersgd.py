"""PowerSGD: compresses gradient matrices to low-rank factors.

[Note: power iteration] PowerSGD (Vogels et al. 2019). For each matrix M of a rank, P = M Q is summed over ranks and
orthogonalized, then Q = M' P is summed: P Q' is the best that one step of power iteration gives for the sum of all M,
and Q is the start of the next step. rank * (rows + columns) numbers are sent instead of rows * columns. The part of a
rank's own gradient that is left out is kept as error feedback and added to the next gradient. Vectors, and matrices too
small to gain by it, are sent uncompressed in the same two all-reduces.

All matrices of one shape are processed as a batch. Parts of a matrix may be apart in the flat buffer (FSDP2 distributes
rows). Invariant: everything is computed from sums over ranks, so all ranks hold the same factors and the same product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import TimedWork
from closeranks.core.pieces import Piece
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.core.seeds import derive_seed
from closeranks.core.traffic import count_collective
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec, ParameterSpan
from closeranks.sync.compress.error_feedback import FACTOR, RESIDUAL, StagedTensor, error_feedback_rows
from closeranks.sync.reducers.local_parameters import CommGroup

LEAST_GAIN = 2.0
"""A matrix is compressed only if its factors are smaller by at least this factor."""
_TINY = 1e-30


class MatrixRows(NamedTuple):
    """Contiguous rows of a matrix."""

    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatMatrix:
    """A parameter in a flat buffer, as far as the buffer contains whole rows of it."""

    name: str
    """The parameter's name, and the box of it where the matrix is not the whole parameter."""
    parts: tuple[MatrixRows, ...]
    num_rows: int
    num_columns: int

    def gather(self, flat: Tensor) -> Tensor:
        found = [flat[part.offset : part.offset + part.numel].view(-1, self.num_columns) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def scatter(self, values: Tensor, flat: Tensor) -> None:
        for part, rows in zip(self.parts, values.view(-1).split([part.numel for part in self.parts]), strict=True):
            flat[part.offset : part.offset + part.numel] = rows


def find_matrices(spec: FlatBufferSpec, rank: int) -> tuple[FlatMatrix, ...]:
    """The parameters worth compressing, in the order of the flat buffer."""
    by_name: dict[str, list[ParameterSpan]] = {}
    for span in spec.spans:
        if len(span.piece.size) > 1:
            by_name.setdefault(span.piece.name, []).append(span)
    found = (_matrix(spans) for spans in by_name.values())
    return tuple(matrix for matrix in found if _gains(matrix.num_rows, matrix.num_columns, rank))


def _gains(rows: int, columns: int, rank: int) -> bool:
    return min(rows, columns) > rank and rows * columns >= LEAST_GAIN * rank * (rows + columns)


def _matrix(spans: Sequence[ParameterSpan]) -> FlatMatrix:
    """The whole rows of spans that may be cut within rows."""
    piece = spans[0].piece
    columns = math.prod(piece.size[1:])
    rows = [(-(-span.begin // columns), span.end // columns) for span in spans]
    whole = [(span, *pair) for span, pair in zip(spans, rows, strict=True) if pair[0] < pair[1]]
    parts = tuple(
        MatrixRows(p.offset + first * columns - p.begin, (last - first) * columns) for p, first, last in whole
    )
    count = sum(last - first for _, first, last in whole)
    first_row = whole[0][0].piece.start[0] + whole[0][1] if whole else 0
    box = [(first_row, count), *zip(piece.start[1:], piece.size[1:], strict=True)]
    is_all = count == piece.shape[0] and piece.size[1:] == piece.shape[1:]
    text = ",".join(f"{start}:{start + size}" for start, size in box)
    return FlatMatrix(piece.name if is_all else f"{piece.name}[{text}]", parts, count, columns)


class _Batch:
    """Matrices of one shape, and the factor Q with which each starts the next step."""

    def __init__(self, matrices: Sequence[FlatMatrix], rank: int, spec: FlatBufferSpec, dtype: torch.dtype) -> None:
        self.matrices = tuple(matrices)
        first = matrices[0]
        self.shape = (len(matrices), first.num_rows, first.num_columns)
        starts = [_beginning(matrix, rank).to(spec.device, dtype) for matrix in matrices]
        self.q = StagedTensor(torch.stack(starts))
        self.m = self.p = torch.empty(0)

    def project(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        self.m = torch.stack([matrix.gather(flat) for matrix in self.matrices]).to(dtype)  # a copy in any case
        return self.m @ self.q.read()

    def take_back(self, p: Tensor) -> Tensor:
        self.p = orthogonalize(p)
        return (self.p.mT @ self.m).mT  # on a CPU twice as fast as M' P

    def restore(self, q: Tensor, flat: Tensor, lost: Tensor | None, num_ranks: int) -> None:
        """Write the product to ``flat``, and what it leaves out of this rank's own gradient to ``lost``."""
        # A zero matrix must not leave a zero factor, from which power iteration would never recover.
        self.q.write(torch.where((q == 0).all(dim=-2, keepdim=True), self.q.read(), q))
        product = (self.p @ q.mT).to(flat.dtype)
        for matrix, values in zip(self.matrices, product, strict=True):
            matrix.scatter(values, flat)
        if lost is not None:
            left = self.m.sub_(product, alpha=1 / num_ranks)
            for matrix, values in zip(self.matrices, left, strict=True):
                matrix.scatter(values, lost)
        self.m = self.p = torch.empty(0)


class PowerSgd:
    """Sums a flat buffer whose matrices are sent as products of rank ``rank``."""

    num_collectives = 2

    def __init__(self, rank: int, group: CommGroup, spec: FlatBufferSpec, *, feedback: bool) -> None:
        self._group, self._spec = group, spec
        matrices = find_matrices(spec, rank)
        # Half-precision types are too imprecise to orthogonalize in.
        self._dtype = spec.dtype if spec.dtype == torch.float64 else torch.float32
        shapes = dict.fromkeys((matrix.num_rows, matrix.num_columns) for matrix in matrices)
        alike = [[m for m in matrices if (m.num_rows, m.num_columns) == shape] for shape in shapes]
        self._batches = [_Batch(group_of, rank, spec, self._dtype) for group_of in alike]
        self._rest = _others(spec, matrices)
        self._residual = (
            StagedTensor(torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)) if feedback else None
        )

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        if self._residual is not None:
            flat.add_(self._residual.read())
        rest = flat.index_select(0, self._rest) if self._rest is not None else flat[:0]
        projected = [batch.project(flat, self._dtype) for batch in self._batches]
        first = _cat([*projected, rest.to(self._dtype)])
        yield self._reduce(first)
        *sums, rest_sum = _split(first, [tuple(p.shape) for p in projected] + [(rest.numel(),)])
        taken_back = [batch.take_back(p) for batch, p in zip(self._batches, sums, strict=True)]
        lost = None if self._residual is None else self._residual.staged()
        if lost is not None and self._rest is not None:
            lost.index_fill_(0, self._rest, 0.0)
        if taken_back:
            second = _cat(taken_back)
            yield self._reduce(second)
            factors = _split(second, [tuple(q.shape) for q in taken_back])
            for batch, q in zip(self._batches, factors, strict=True):
                batch.restore(q, flat, lost, self._group.size)
        if self._rest is not None:
            flat.index_copy_(0, self._rest, rest_sum.to(flat.dtype))

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        """Every rank computes the whole sum and takes its slice: the factors are too small to be worth slicing."""
        yield from self.all_reduce(outgoing)
        share = arriving.numel()
        arriving.copy_(outgoing[share * self._group.rank : share * (self._group.rank + 1)])

    def commit(self, taken: Tensor) -> None:
        for staged in (self._residual, *(batch.q for batch in self._batches)):
            if staged is not None:
                staged.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        if self._residual is not None:
            yield from error_feedback_rows(
                RESIDUAL, self._residual.committed, self._spec, self._group.rank, self._group.size
            )
        for batch in self._batches:
            for matrix, q in zip(batch.matrices, batch.q.committed, strict=True):
                piece = Piece.whole(f"{FACTOR}/{matrix.name}", (1, *q.shape))
                yield ErrorFeedbackTensor(FACTOR, piece, q.unsqueeze(0), is_saved_here=self._group.rank == 0)

    def _reduce(self, flat: Tensor) -> TimedWork:
        count_collective("data", "all-reduce", self._group.size, flat)
        work: dist.Work | None = dist.all_reduce(flat, group=self._group.process_group, async_op=True)
        assert work is not None
        return TimedWork(work, "data.all_reduce")


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthonormalize the columns: on a CPU by a QR factorization, elsewhere by Gram-Schmidt, which is cheaper there for
    a few columns."""
    if matrices.device.type != "cpu":
        return gram_schmidt(matrices)
    factor: Tensor = torch.linalg.qr(matrices).Q
    return factor


def gram_schmidt(matrices: Tensor) -> Tensor:
    """Gram-Schmidt, with each column orthogonalized twice: what remains of a linearly dependent column is rounding
    error, which once normalised may overlap the others again, and a direction must not count twice. A column of zeros
    stays zero."""
    columns: list[Tensor] = []
    for column in matrices.unbind(-1):
        for _ in range(2):
            for other in columns:
                column = column - other * (other * column).sum(-1, keepdim=True)
            column = column / (column.norm(dim=-1, keepdim=True) + _TINY)
        columns.append(column)
    return torch.stack(columns, dim=-1)


def _beginning(matrix: FlatMatrix, rank: int) -> Tensor:
    """The initial factor: random, and the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(derive_seed(0, "powersgd", matrix.name))
    return torch.randn(matrix.num_columns, rank, generator=generator)


def _others(spec: FlatBufferSpec, matrices: Sequence[FlatMatrix]) -> Tensor | None:
    """Indices of the elements that are sent uncompressed; None where there are none."""
    is_uncompressed = torch.ones(spec.numel, dtype=torch.bool)
    for matrix in matrices:
        for part in matrix.parts:
            is_uncompressed[part.offset : part.offset + part.numel] = False
    return is_uncompressed.nonzero().view(-1).to(spec.device) if is_uncompressed.any() else None


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

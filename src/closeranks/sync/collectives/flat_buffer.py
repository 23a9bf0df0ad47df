"""Describes a flat buffer that is reduced: which elements belong to which parameter.

A buffer spec describes a bucket or an FSDP unit of gradients to its reduction: the number of elements, and the spans of
the parameters in it, by which error feedback is found again in any other layout. Sizes and corners are in memory order,
slowest dim first. Invariants: spans do not overlap; what no span covers is padding, belongs to no parameter and holds
zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from closeranks.core.pieces import Piece
from closeranks.core.protocols import LocalParameter
from closeranks.sync.reducers.local_parameters import dense_strides


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """Elements ``begin`` to ``end`` of a box of a parameter, row by row, are at ``offset``."""

    piece: Piece
    offset: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def is_box(self) -> bool:
        """Whether the span covers its whole box."""
        return self.begin == 0 and self.end == self.piece.numel


@dataclass(frozen=True)
class FlatBufferSpec:
    """A flat buffer without its values: size and spans."""

    spans: tuple[ParameterSpan, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def padding_indices(self) -> Tensor | None:
        """Indices of the padding elements; None where there are none."""
        is_gap = torch.ones(self.numel, dtype=torch.bool)
        for span in self.spans:
            is_gap[span.offset : span.offset + span.numel] = False
        return is_gap.nonzero().view(-1).to(self.device) if is_gap.any() else None

    def zero_padding(self, flat: Tensor) -> None:
        """Zero the padding: codes of a few bits cannot represent zero."""
        if self.padding_indices is not None:
            flat.index_fill_(0, self.padding_indices, 0.0)

    def slice(self, first: int, last: int) -> FlatBufferSpec:
        """The spec of elements ``first`` to ``last`` alone."""
        clipped = (_clipped(span, first, last) for span in self.spans)
        return replace(self, spans=tuple(span for span in clipped if span.numel > 0), numel=last - first)


def _clipped(span: ParameterSpan, first: int, last: int) -> ParameterSpan:
    begin, end = max(span.offset, first), min(span.offset + span.numel, last)
    if begin >= end:
        return replace(span, begin=0, end=0)
    skipped = begin - span.offset
    return ParameterSpan(span.piece, begin - first, span.begin + skipped, span.begin + skipped + end - begin)


def parameter_span(held: LocalParameter, offset: int) -> ParameterSpan:
    """The span of a held parameter that is stored densely at ``offset``."""
    piece = in_memory_order(held.piece, memory_order(held.parameter))
    return ParameterSpan(piece, offset, 0, piece.numel)


def memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Its dims, from the slowest-varying in memory to the fastest."""
    strides = dense_strides(parameter)
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def in_memory_order(piece: Piece, order: Sequence[int]) -> Piece:
    """The piece with its dims in memory order. Its name says so where that differs from the parameter's own order, so
    that it is never mistaken for a piece in plain order."""

    def sorted_by(sizes: Iterable[int]) -> tuple[int, ...]:
        sizes = tuple(sizes)
        return tuple(sizes[dim] for dim in order)

    name = piece.name if list(order) == sorted(order) else f"{piece.name}@{','.join(map(str, order))}"
    return Piece(name, sorted_by(piece.shape), sorted_by(piece.start), sorted_by(piece.size), piece.flat)


def flat_buffer_spec(held: Sequence[LocalParameter], offsets: Sequence[int], flat: Tensor) -> FlatBufferSpec:
    """The spec of a flat tensor that holds these parameters at these offsets."""
    spans = tuple(parameter_span(one, offset) for one, offset in zip(held, offsets, strict=True))
    return FlatBufferSpec(spans, flat.numel(), flat.dtype, flat.device)

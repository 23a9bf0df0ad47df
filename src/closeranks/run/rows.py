"""What of the state belongs to one replica alone, and how is it saved?

Replicas that train apart each have their own moments, counters and loss scale, and between meetings of a fragment their
own weights. Those are saved as tensors with one dim more in front, a row for every replica, of which each replica holds
its own. What all have alike, the anchor and the outer momentum, is saved once, piece by piece as weights are. The model
in a checkpoint is the anchor: where all replicas stood when each fragment last met.

[Note: rows] A state of R replicas is taken up by any other number: replica r goes on from row ``r mod R``, one that
trains with all the others from row 0. A state without rows goes to every replica alike, and then the anchor is where
its weights are and the outer momentum is zero. Invariant: with as many replicas as before, all get back what they had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from closeranks.core.pieces import Piece
from closeranks.parallel.apply import is_sharded
from closeranks.parallel.group import Group
from closeranks.run.parts import Parts

MOMENTUM, WEIGHTS = "outer/momentum", "outer/weights"


class Shared(NamedTuple):
    """Something of the state that goes by a leaf's piece."""

    piece: Piece
    """By its key in the state."""
    tensor: Tensor
    is_ours: bool
    """False where a rank off the data axis holds the same and saves it."""
    holders: Group


def row_of(piece: Piece, number: int, count: int) -> Piece:
    """The same piece of row ``number``."""
    return Piece(piece.name, (count, *piece.shape), (number, *piece.start), (1, *piece.size), piece.flat)


def as_row(parts: Parts, piece: Piece, tensor: Tensor) -> tuple[Piece, Tensor]:
    """What this replica alone has, as its row, in the same memory; as they are where nobody trains apart."""
    if parts.outer is None:
        return piece, tensor
    home = parts.groups.home
    return row_of(piece, home.number, home.count), tensor if piece.flat is not None else tensor.unsqueeze(0)


def found_row(parts: Parts, piece: Piece, saved: tuple[int, ...]) -> Piece:
    """Where this replica finds a piece in what was saved, which is of shape ``saved``; see [Note: rows]."""
    if len(saved) == len(piece.shape):
        return piece
    return row_of(piece, parts.groups.home.number % saved[0], saved[0])


def anchors(parts: Parts) -> Iterator[Shared]:
    """Where each leaf stood when it met last: what a checkpoint's model is."""
    assert parts.outer is not None
    terms = _Terms.of(parts)
    for kept in parts.outer.kept():
        yield terms.shared(kept.leaf.piece, kept.leaf.piece.name, kept.anchor)


def momenta(parts: Parts) -> Iterator[Shared]:
    """What meetings remember."""
    terms = _Terms.of(parts)
    for leaf, _, momentum in parts.outer.kept() if parts.outer is not None else ():
        if momentum is not None:
            yield terms.shared(leaf.piece, f"{MOMENTUM}/{leaf.piece.name}", momentum)


def weights_key(piece: Piece) -> str:
    return f"{WEIGHTS}/{piece.name}"


@dataclass(frozen=True, slots=True)
class _Terms:
    """Which parameters this rank speaks for among tensor and pipeline ranks, and which are split by zero=3."""

    parts: Parts
    spoken: frozenset[str]
    cut: frozenset[str]

    @classmethod
    def of(cls, parts: Parts) -> _Terms:
        held = parts.applied.held
        spoken = frozenset(one.piece.name for one in held if one.is_spoken)
        return cls(parts, spoken, frozenset(one.piece.name for one in held if is_sharded(one)))

    def shared(self, piece: Piece, key: str, tensor: Tensor) -> Shared:
        groups, is_cut = self.parts.groups, self.parts.layout.zero in (1, 2) or piece.name in self.cut
        holders = groups.replica if is_cut else groups.data
        return Shared(replace(piece, name=key), tensor, piece.name in self.spoken, holders)


class Readable(Protocol):
    """As much of ``run.state.Saved`` as is needed here."""

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]: ...

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None: ...


def has_weights(parts: Parts, saved: Readable, section: str) -> bool:
    """Whether each replica finds weights of its own, and the model that was saved is the anchor."""
    found = saved.shapes(section)
    return parts.rounds.num_fragments > 1 and any(key.startswith(f"{WEIGHTS}/") for key in found)


def restore_outer(parts: Parts, saved: Readable, section: str, model: str) -> None:
    """``section`` holds what meetings remember; ``model`` is the anchor. It is not taken from the weights, even where
    these are the same: on an accelerator they may be on their way."""
    if parts.outer is None:
        return
    parts.outer.restart()
    found = saved.shapes(section)
    for leaf, anchor, momentum in parts.outer.kept():
        key = f"{MOMENTUM}/{leaf.piece.name}"
        if momentum is not None and key in found:
            saved.read_into(section, key, replace(leaf.piece, name=key), momentum)
        saved.read_into(model, leaf.piece.name, leaf.piece, anchor)

"""Restores a rank's tensors from snapshot slots, whatever layout wrote them.

With the same layout, each entry is a contiguous range of its tensor and is digested while it is copied there. After a
resize, a tensor is assembled from the entries that overlap it. Invariant: every byte returned was checked against the
digest taken when the snapshot was written, or ``SlotError`` says whose copy is damaged; in that case the tensors may be
partly filled, and the caller must fill them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, Self

import torch
from crc32c import crc32c
from torch import Tensor

from closeranks.capture.capture_plan import copy_and_digest, tensor_bytes
from closeranks.capture.slots import ByteArray, SealedSlot, SlotEntry, SlotError, damage_message
from closeranks.core.pieces import Piece
from closeranks.core.reshard import ContiguousBox, TensorBox, plan_copies


@dataclass(frozen=True, slots=True)
class _Stored:
    slot: SealedSlot
    entry: SlotEntry
    crc: int
    piece: Piece

    def values(self) -> Tensor:
        """The elements, flat, not checked against their digest."""
        dtype: torch.dtype = getattr(torch, self.entry.dtype)
        if not self.entry.num_bytes:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(self.slot.data(self.entry)).view(dtype)


@dataclass(frozen=True, slots=True)
class _EntrySlice:
    """An entry that lies contiguously in a wanted piece, as elements ``first`` to ``last``."""

    stored: _Stored
    first: int
    last: int

    def copy(self, place: ByteArray) -> None:
        one = self.stored
        if copy_and_digest(one.slot.data(one.entry), [place]) != one.crc:
            raise DamagedSnapshot(one.slot, one.entry)

    def copy_to(self, target: Tensor) -> None:
        """Copy to a device through pinned memory from torch's caching allocator: far less than pinning the slot."""
        one = self.stored
        with torch.cuda.device(target.device), torch.no_grad():
            pinned = torch.empty(self.last - self.first, dtype=target.dtype, pin_memory=True)
            place = tensor_bytes(pinned)
            one.slot.read(one.entry, place)
            if crc32c(place.data) != one.crc:
                raise DamagedSnapshot(one.slot, one.entry)
            target[self.first : self.last].copy_(pinned, non_blocking=True)


def _entry_slices(stored: Sequence[_Stored], piece: Piece) -> list[_EntrySlice] | None:
    """The entries that make up a piece back to back, if the same box was stored; else None."""
    first, last = piece.flat or (0, prod(piece.size))
    found: list[_EntrySlice] = []
    at = first
    for one in stored:
        begin, end = one.piece.flat or (0, prod(one.piece.size))
        is_same_box = (one.piece.start, one.piece.size) == (piece.start, piece.size)
        if is_same_box and begin == at and at < end <= last:
            found.append(_EntrySlice(one, begin - first, end - first))
            at = end
    return found if at == last else None


class DamagedSnapshot(SlotError):
    """Bytes of a snapshot changed in memory."""

    def __init__(self, slot: SealedSlot, entry: SlotEntry) -> None:
        super().__init__(damage_message(slot, entry))
        self.slot = slot


@dataclass
class SnapshotReader:
    """The images of one state that a rank needs, the preferred one first. Implements
    ``run.state.saved_state.SavedState``.

    Inside a ``with`` block, tensors on a device are filled asynchronously by ``num_threads`` threads. When the block is
    left, all of them are filled and checked, or ``DamagedSnapshot`` is raised, and no thread writes to them any more.
    """

    slots: Sequence[SealedSlot]
    num_threads: int = 4
    _pool: ThreadPoolExecutor | None = None
    _pending: list[Future[None]] = field(default_factory=list)
    _stored: dict[tuple[str, str], list[_Stored]] = field(default_factory=dict)
    _checked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for slot in self.slots:
            for entry, crc in zip(slot.index.entries, slot.index.crcs, strict=True):
                piece = Piece(entry.key, entry.shape, entry.start, entry.size, entry.flat)
                dtype = getattr(torch, entry.dtype, None)
                if not isinstance(dtype, torch.dtype) or piece.numel * dtype.itemsize != entry.num_bytes:
                    raise SlotError(
                        f"damaged: {entry.section}/{entry.key} has {entry.num_bytes} bytes as {entry.dtype}"
                    )
                self._stored.setdefault((entry.section, entry.key), []).append(_Stored(slot, entry, crc, piece))

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self.num_threads, "recall")  # starts threads only when they are needed
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pool, self._pool, pending, self._pending = self._pool, None, self._pending, []
        assert pool is not None, "entered"
        pool.shutdown(cancel_futures=error is not None)
        for one in pending if error is None else ():
            one.result()

    @property
    def tree(self) -> Mapping[str, Any]:
        return self.slots[0].index.tree

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        return {key: found[0].entry.shape for (of, key), found in self._stored.items() if of == section}

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        stored = self._of(section, key, piece)
        made = torch.empty(piece.local_shape, dtype=dtype or stored[0].values().dtype)
        self.read_into(section, key, piece, made)
        return made

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        stored = self._of(section, key, piece)
        dtype: torch.dtype = getattr(torch, stored[0].entry.dtype)
        is_straight = out.is_contiguous() and out.dtype == dtype
        with torch.no_grad():
            slices = _entry_slices(stored, piece)
            if slices is not None and is_straight:
                self._fill(slices, out.detach().view(-1))
                return
            whole = torch.empty(piece.numel, dtype=dtype)
            if slices is not None:
                self._fill(slices, whole)
            else:
                self._from_overlaps(stored, piece, whole)
            out.copy_(whole.view(out.shape))

    def _of(self, section: str, key: str, piece: Piece) -> list[_Stored]:
        stored = self._stored.get((section, key), [])
        if not stored or stored[0].entry.shape != piece.shape:
            raise SlotError(f"no copy holds {section}/{key} of shape {piece.shape}")
        return stored

    def _fill(self, slices: Sequence[_EntrySlice], target: Tensor) -> None:
        """On the CPU one pass copies and digests; for a device several threads do, one entry at a time each."""
        for one in slices:
            if not target.is_cuda:
                one.copy(tensor_bytes(target[one.first : one.last]))
            elif self._pool is None:
                one.copy_to(target)
            else:
                self._pending.append(self._pool.submit(one.copy_to, target))

    def _from_overlaps(self, stored: Sequence[_Stored], piece: Piece, target: Tensor) -> None:
        planned = plan_copies(piece, [one.piece for one in stored])
        if planned.missing:
            raise SlotError(f"no copy holds all of {stored[0].entry.section}/{stored[0].entry.key}")
        for overlap in planned.overlaps:
            one = stored[overlap.saved]
            self._check(one)
            _view(target, overlap.target, overlap.box).copy_(_view(one.values(), overlap.source, overlap.box))

    def _check(self, one: _Stored) -> None:
        """Check the digest, once per entry."""
        if id(one) not in self._checked and crc32c(one.slot.data(one.entry).data) != one.crc:
            raise DamagedSnapshot(one.slot, one.entry)
        self._checked.add(id(one))


def _view(memory: Tensor, contiguous: ContiguousBox, box: TensorBox) -> Tensor:
    """A box as a view of a piece's memory."""
    view = memory[contiguous.first : contiguous.first + contiguous.box.numel].view(contiguous.box.size)
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        view = view.narrow(dim, start - contiguous.box.start[dim], size)
    return view

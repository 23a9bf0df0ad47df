"""Transfers a sealed slot to another host.

A slot is sent as it lies in memory: first its header in one message of fixed size, from which both sides know how much
follows; then data and index in pieces of at most 64 MiB. Invariants: a sender without a slot sends an all-zero header
and nothing after it, so that the receiver does not wait; the receiver seals a slot only after it has verified every
digest in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.capture.slots import DATA_AT, HEADER_BYTES, ByteArray, SnapshotSlot, decode_header, received_problem

_PIECE_BYTES = 64 << 20
_NO_HEADER = bytes(HEADER_BYTES)

Works = list[dist.Work]


def send_slot(slot: ByteArray | None, to: int, group: dist.ProcessGroup | None = None) -> Works:
    """Start to send a sealed slot, given as its whole file, or a header that says there is none. The slot must not
    change until the returned works are done."""
    header = np.frombuffer(bytearray(_NO_HEADER), np.uint8) if slot is None else slot[:HEADER_BYTES]
    works = [_isend(header, to, group)]
    if slot is not None:
        works += [_isend(piece, to, group) for piece in _pieces(slot, header)]
    return works


@dataclass(frozen=True, slots=True)
class ReceivedSlot:
    is_sealed: bool
    problem: str = ""
    """What went wrong; empty if the sender had no slot."""


def receive_slot(slot: SnapshotSlot | None, of: int, group: dist.ProcessGroup | None = None) -> ReceivedSlot:
    """Receive what ``send_slot`` sends, and seal it. Without a slot, or without memory for it, the data is received and
    discarded: the sender must not wait forever."""
    head = np.empty(HEADER_BYTES, np.uint8)
    _recv(head, of, group)
    decoded = decode_header(head.tobytes())
    if isinstance(decoded, str):
        return ReceivedSlot(False, "" if decoded == "empty" else f"the snapshot from rank {of} is {decoded}")
    about, lengths = decoded
    problem = ""
    try:
        if slot is not None:
            slot.reserve(lengths.num_data, lengths.num_index)
            slot.invalidate()
    except OSError as error:
        slot, problem = None, f"there is no memory for the copy of rank {of}: {error.strerror}"
    if slot is None:
        _drain(lengths.index_at + lengths.num_index - DATA_AT, of, group)
        return ReceivedSlot(False, problem)
    slot.populate(lengths.num_data)
    for piece in _pieces(slot.bytes, head):
        _recv(piece, of, group)
    index = slot.bytes[lengths.index_at : lengths.index_at + lengths.num_index].tobytes()
    problem = received_problem(slot.bytes, lengths, index)
    if not problem:
        slot.seal(about, lengths.num_data, index)
    return ReceivedSlot(not problem, problem and f"the snapshot from rank {of} {problem}")


def _pieces(slot: ByteArray, header: ByteArray) -> list[ByteArray]:
    decoded = decode_header(header.tobytes())
    assert not isinstance(decoded, str), "only sealed slots travel"
    end = decoded[1].index_at + decoded[1].num_index
    return [slot[start : min(start + _PIECE_BYTES, end)] for start in range(DATA_AT, end, _PIECE_BYTES)]


def _drain(num_bytes: int, of: int, group: dist.ProcessGroup | None) -> None:
    scratch = np.empty(min(num_bytes, _PIECE_BYTES), np.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        _recv(scratch[: min(_PIECE_BYTES, num_bytes - start)], of, group)


def _isend(piece: ByteArray, to: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.isend(_tensor(piece), to, group=group)
    assert work is not None, "the sender is in the group"
    return work


def _recv(piece: ByteArray, of: int, group: dist.ProcessGroup | None) -> None:
    dist.recv(_tensor(piece), of, group=group)


def _tensor(piece: ByteArray) -> Tensor:
    return torch.from_numpy(piece)

"""Copies of a device's tensors: what was there when the step was committed, whatever comes after ``join``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from closeranks.capture.device_copy import HALF_BYTES
from closeranks.capture.pinned_memory import PinnedMemory
from closeranks.capture.slots import DATA_AT, SealedSlot, SlotHeader
from closeranks.capture.tensors import StateTensor
from closeranks.core.pieces import Piece
from closeranks.elastic.snapshot_reader import DamagedSnapshot, SnapshotReader
from closeranks.elastic.snapshot_writer import SnapshotDestinations
from tests.capture.changes import changed
from tests.capture.taking import Kept
from tests.elastic.snapshot_files import make_snapshot_files, shared_memory

pytestmark = pytest.mark.gpu

ABOUT = SlotHeader(generation=0, step=1, image="p0-s0-t0", num_images=1)


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def holdings() -> list[StateTensor]:
    """Larger than both halves of what copies pass through, with small ones, an empty one and one on the CPU."""
    shapes = [(3 * HALF_BYTES // 4,), (7,), (0, 3), (1024, 1500), ()]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    tensors += [
        torch.randn(40, 30, device="cuda").t(),
        torch.ones(5, dtype=torch.bfloat16, device="cuda"),
        torch.ones(3),
    ]
    named = enumerate(tensors)
    return [StateTensor("model", f"t{n}", Piece.whole(f"t{n}", tuple(t.shape)), t, is_steady=n != 1) for n, t in named]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_is_of_the_committed_state(place: Path, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight into slots, and through pinned memory where CUDA refuses them."""
    if not is_pinned:
        monkeypatch.setattr(PinnedMemory, "pin", lambda pinned, is_enough: False)
    one, other = make_snapshot_files(place, 2)
    kept = Kept(SnapshotDestinations((one[0], one[1]), (other[2], other[3])))
    held = holdings()
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(3):
        for item in held:
            item.tensor.add_(1.0)
        expected = [item.tensor.clone() for item in held]
        kept.begin(replace(ABOUT, step=step), held, b"{}")
        held[1].tensor.mul_(2.0)  # a buffer: forward changes it at once
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)
        joined = kept.join()
        assert joined is not None
        assert joined.is_sealed
        for item in held:
            item.tensor.sub_(0.25)  # the optimizer
        for path in (one[step % 2], other[2 + step % 2]):
            assert changed(path) == []
            recalled = SnapshotReader([SealedSlot(path)])
            for item, was in zip(held, expected, strict=True):
                fresh = torch.zeros_like(item.tensor)
                recalled.read_into(item.section, item.key, item.piece, fresh)
                assert torch.equal(fresh, was), item.key
    kept.capture._pin_thread.drain()
    assert [pinned.is_pinned for pinned in kept.capture._pinned_slots.values()] == [is_pinned] * 2
    kept.close()


def test_training_goes_on_as_soon_as_a_copy_has_landed(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    kept, held = Kept(SnapshotDestinations((box[0], box[1]))), holdings()
    for step in range(4):
        expected = [item.tensor.clone() for item in held]
        kept.begin(replace(ABOUT, step=step), held, b"{}")
        kept.land()
        for item in held:
            item.tensor.sub_(0.25)  # the optimizer, while the copy is being digested
        joined = kept.join()
        assert joined is not None
        assert joined.is_sealed
        assert joined.stall_s <= joined.late_s
        with SnapshotReader([SealedSlot(box[step % 2])], 8) as recalled:
            found = [torch.zeros_like(item.tensor) for item in held]
            for item, fresh in zip(held, found, strict=True):
                recalled.read_into(item.section, item.key, item.piece, fresh)
        for item, fresh, was in zip(held, found, expected, strict=True):
            assert torch.equal(fresh, was), item.key
    kept.close()


def test_damage_is_told_when_all_threads_are_done(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    kept, held = Kept(SnapshotDestinations((box[0], box[1]))), holdings()
    kept.begin(ABOUT, held, b"{}")
    kept.join()
    kept.close()
    entry = SealedSlot(box[0]).index.entries[1]
    with open(box[0], "r+b") as file:
        file.seek(DATA_AT + entry.offset + 3)
        file.write(b"\x07\x09")
    fresh = torch.zeros_like(held[0].tensor)
    with pytest.raises(DamagedSnapshot, match="model/t0 changed"), SnapshotReader([SealedSlot(box[0])]) as recalled:
        recalled.read_into("model", "t0", held[0].piece, fresh)


def test_a_slot_is_pinned_once_and_given_back(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    kept, held = Kept(SnapshotDestinations((box[0], box[1]))), holdings()
    kept.keeper.make_ready(kept.capture, held)
    kept.capture._pin_thread.drain()
    pins = dict(kept.capture._pinned_slots)
    assert [pinned.is_pinned for pinned in pins.values()] == [True, True]
    for step in range(3):
        kept.begin(replace(ABOUT, step=step), held, b"{}")
        kept.join()
    assert kept.capture._pinned_slots == pins
    kept.close()
    again = PinnedMemory(next(iter(pins.values())).memory)  # CUDA refuses what is pinned already
    assert again.pin(threading.Event())
    again.release()

"""A slot is whole or says why it is not: torn by a kill at any point, cut, flipped, foreign, empty."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from closeranks.capture import slots
from closeranks.capture.slots import (
    DATA_AT,
    HEADER_BYTES,
    SealedSlot,
    SlotEntry,
    SlotError,
    SlotHeader,
    SnapshotSlot,
    decode_index,
    encode_entries,
    encode_index,
    inspect_slot,
    void_slot,
)
from closeranks.capture.tensors import StateTensor
from closeranks.core.pieces import Piece
from closeranks.core.system import failpoints
from closeranks.elastic import snapshot_writer
from closeranks.elastic.snapshot_reader import DamagedSnapshot, SnapshotReader
from closeranks.elastic.snapshot_writer import SnapshotDestinations
from tests.capture.changes import changed
from tests.capture.taking import Kept
from tests.elastic.snapshot_files import make_snapshot_files, shared_memory

ABOUT = SlotHeader(generation=2, step=7, image="p0-s1-t0", num_images=4, layout="0123456789abcdef", rank=1, run=3)


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def holdings(value: float) -> list[StateTensor]:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(40, 33, generator=generator) * value
    return [
        StateTensor("model", "weight", Piece("weight", (80, 33), (40, 0), (40, 33)), weight),
        StateTensor("model", "empty", Piece("empty", (0, 3), (0, 0), (0, 3)), torch.empty(0, 3)),
        StateTensor("model", "half", Piece.whole("half", (5,)), torch.full((5,), value, dtype=torch.bfloat16)),
        StateTensor("optimizer", "flat", Piece.whole("flat", (9,)).flattened(2, 7), torch.arange(5.0) * value),
        StateTensor("model", "mean", Piece.whole("mean", ()), torch.tensor(value), is_steady=False),
    ]


def keep(boxes: tuple[str, ...], step: int, turns: int = 1, beside: tuple[str, str] | None = None) -> Kept:
    kept = Kept(SnapshotDestinations((boxes[0], boxes[1]), beside))
    for number in range(turns):
        kept.begin(
            replace(ABOUT, step=step + number), holdings(float(step + number)), json.dumps({"at": step}).encode()
        )
        joined = kept.join()
        assert joined is not None
        assert joined.is_sealed
    return kept


def recalled(path: str) -> dict[str, torch.Tensor]:
    found = SnapshotReader([SealedSlot(path)])
    return {held.key: found.read(held.section, held.key, held.piece) for held in holdings(0.0)}


def test_what_was_kept_comes_back_bit_for_bit(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    assert inspect_slot(box[0]).header == ABOUT
    assert inspect_slot(box[1]).reason == "empty"
    assert changed(box[0]) == []
    assert SealedSlot(box[0]).index.tree == {"at": 7}
    for held in holdings(7.0):
        assert torch.equal(
            recalled(box[0])[held.key].view(-1).view(torch.uint8), held.tensor.view(-1).view(torch.uint8)
        )


def test_slots_take_turns_and_a_peer_gets_the_same(place: Path) -> None:
    one, other = make_snapshot_files(place, 2)
    keep(one, 7, turns=3, beside=(other[2], other[3])).close()
    steps = [about and about.step for about in (inspect_slot(path).header for path in (*one, *other))]
    assert steps == [9, 8, None, None, None, None, 9, 8]
    assert torch.equal(recalled(other[2])["weight"], recalled(one[0])["weight"])


def test_an_index_is_what_it_was() -> None:
    rows = [("model", "a/b", (4, 6), (0, 2), (4, 2), None), ("other", "ü", (), (), (), (0, 1))]
    entries = [SlotEntry(*row, "float32", 64, 12) for row in rows]
    index = decode_index(encode_index(encode_entries(entries), b'{"x": [1]}', [7, 2**32 - 1]))
    assert index.entries == tuple(entries)
    assert (index.tree, index.crcs) == ({"x": [1]}, (7, 2**32 - 1))


# Damage


def flip(path: str, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def is_noticed(path: str) -> bool:
    if inspect_slot(path).header is None:
        return True
    try:
        recalled(path)
    except DamagedSnapshot:
        return changed(path) != []
    return False


def covered(path: str) -> list[range]:
    """Every byte that means anything."""
    sealed = SealedSlot(path)
    entries = [range(DATA_AT + e.offset, DATA_AT + e.offset + e.num_bytes) for e in sealed.index.entries]
    at = sealed.extents.index_at
    return [range(HEADER_BYTES), *entries, range(at, at + sealed.extents.num_index)]


def test_a_flipped_bit_is_noticed_wherever_it_is(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    assert not is_noticed(box[0])
    draw = random.Random(3)
    spots = [draw.choice(part) for part in covered(box[0]) if part for _ in range(40)]
    for at in (*spots, *range(16)):
        bit = draw.randrange(8)
        flip(box[0], at, bit)
        assert is_noticed(box[0]), f"byte {at}, bit {bit}"
        flip(box[0], at, bit)
    assert not is_noticed(box[0])


def test_a_damaged_tensor_is_named(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    (entry,) = [e for e in SealedSlot(box[0]).index.entries if e.key == "flat"]
    flip(box[0], DATA_AT + entry.offset + 3, 0)
    with pytest.raises(DamagedSnapshot, match="p0-s1-t0 at step 7 is damaged: the bytes of optimizer/flat changed"):
        recalled(box[0])


def test_files_that_hold_no_copy_say_why(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    whole = Path(box[0]).read_bytes()
    cases = {
        "empty": b"",
        "empty ": bytes(9000),
        "foreign": b"SQLite format 3\0" + whole[16:],
        "truncated": whole[: DATA_AT + 100],
        "damaged: its header": whole[:20] + b"x" + whole[21:],
        "torn": b"CLRANKS~" + whole[8:],
        "damaged: it was marked as void": b"CLRANKS!" + whole[8:],
    }
    for reason, content in cases.items():
        Path(box[1]).write_bytes(content)
        looked = inspect_slot(box[1])
        assert looked.header is None
        assert looked.reason.startswith(reason.strip()), reason
    os.unlink(box[1])
    assert inspect_slot(box[1]).reason.startswith("damaged: it cannot be read")


# Kills

POINTS = ["slot.before_data", "slot.in_data", "slot.after_data", "slot.after_index", "slot.before_header"]


def killed_at(label: str, passing: int, boxes: tuple[str, ...], beside: tuple[str, str] | None) -> int:
    child = os.fork()
    if not child:
        try:
            failpoints._REQUESTED = (label, passing)
            keep(boxes, 7, turns=3, beside=beside)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("label", [*POINTS, "slot.after_header"])
@pytest.mark.parametrize("turn", [2, 3])
def test_a_kill_at_any_point_leaves_the_step_before(place: Path, label: str, turn: int) -> None:
    """Three copies, of steps 7, 8 and 9; the process dies in the second or third."""
    (box,) = make_snapshot_files(place, 1)
    assert killed_at(label, turn, box, None) == -signal.SIGKILL
    looked = [inspect_slot(path) for path in box[:2]]
    steps = {found.header.step for found in looked if found.header}
    newest = 6 + turn
    if label == "slot.after_header":
        assert steps == {newest - 1, newest}
    else:
        assert steps == {newest - 1}
        (other,) = [found for found in looked if not found.header]
        assert other.reason == ("torn: it was being written")
    for path in box[:2]:
        assert inspect_slot(path).header is None or changed(path) == []


@pytest.mark.parametrize("passing", range(1, 7))
def test_a_kill_between_the_own_slot_and_the_peers_leaves_both_steps_before(place: Path, passing: int) -> None:
    one, other = make_snapshot_files(place, 2)
    assert killed_at("slot.before_header", passing, one, (other[2], other[3])) == -signal.SIGKILL
    sound = [{i.header.step for i in map(inspect_slot, pair) if i.header} for pair in (one[:2], other[2:])]
    before = 6 + (passing + 1) // 2 - 1
    if before > 6:
        assert before in sound[0]
        assert before in sound[1]
    assert (7 + (passing - 1) // 2 in sound[0]) == (passing % 2 == 0)


def test_all_points_of_writing_are_swept() -> None:
    assert {label for label in failpoints.FAILPOINTS if label.startswith("slot.")} == {*POINTS, "slot.after_header"}


# Want of memory, and what changes too early


def starved(boxes: tuple[str, ...]) -> int:
    child = os.fork()
    if not child:
        kept = keep(boxes, 7)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        kept.begin(replace(ABOUT, step=8), holdings(8.0), b"{}")
        joined = kept.join()
        assert joined is not None
        is_told = "no memory" in joined.problem and not joined.is_sealed
        kept.begin(replace(ABOUT, step=9), holdings(9.0), b"{}")
        again = kept.join()
        os._exit(42 if is_told and again is not None and not again.problem and not again.is_sealed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_want_of_memory_is_told_once_and_leaves_the_copy_before(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    assert starved(box) == 42
    about = inspect_slot(box[0]).header
    assert about is not None
    assert about.step == 7


def test_a_tensor_that_changes_too_early_leaves_the_slot_torn_and_is_copied_at_once_from_then_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = make_snapshot_files(place, 1)
    kept = keep(box, 7)
    held = holdings(8.0)
    monkeypatch.setattr(
        snapshot_writer, "failpoint", lambda label: held[0].tensor.add_(1.0)
    )  # as if forward changed a weight
    kept.begin(replace(ABOUT, step=8), held, b"{}")
    joined = kept.join()
    assert joined is not None
    assert "'weight' changed" in joined.problem
    assert inspect_slot(box[1]).header is None
    about = inspect_slot(box[0]).header
    assert about is not None
    assert about.step == 7
    monkeypatch.undo()
    kept.begin(replace(ABOUT, step=9), held, b"{}")
    expected = held[0].tensor.clone()
    held[0].tensor.add_(1.0)
    joined = kept.join()
    assert joined is not None
    assert joined.is_sealed
    assert torch.equal(recalled(box[1])["weight"], expected)
    kept.close()


def test_a_slot_grows_and_keeps_what_it_says(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    slot = SnapshotSlot(box[0])
    for num_data in (100, 5 << 20):
        slot.reserve(num_data, 64)
        slot.invalidate()
        slot.data(num_data)[:] = np.uint8(num_data % 251)
        slot.seal(ABOUT, num_data, encode_index(b"[]", b"{}", []))
        assert inspect_slot(box[0]).header == ABOUT
        assert SealedSlot(box[0]).extents.num_data == num_data
    slot.close()


def test_what_is_void_is_no_copy_until_it_is_written_again(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    void_slot(box[0])
    assert inspect_slot(box[0]).reason == "damaged: it was marked as void"
    keep(box, 8).close()
    about = inspect_slot(box[0]).header
    assert about is not None
    assert about.step == 8


def test_who_gives_up_leaves_a_copy_alone_and_marks_what_is_empty(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    for path in box[:2]:
        slot = SnapshotSlot(path)
        slot.mark_void()
        slot.close()
    assert inspect_slot(box[0]).header == ABOUT
    assert inspect_slot(box[1]).reason == "damaged: it was marked as void"


def test_bytes_are_read_without_mapping_them(place: Path) -> None:
    (box,) = make_snapshot_files(place, 1)
    keep(box, 7).close()
    sealed = SealedSlot(box[0])
    for entry in sealed.index.entries:
        found = np.zeros(entry.num_bytes, np.uint8)
        sealed.read(entry, found)
        assert np.array_equal(found, sealed.data(entry))
    os.truncate(box[0], DATA_AT + 10)
    with pytest.raises(SlotError, match="truncated: it ends within model/weight"):
        sealed.read(sealed.index.entries[0], np.zeros(sealed.index.entries[0].num_bytes, np.uint8))


def test_a_copy_that_has_landed_is_of_its_step_whatever_comes_before_its_seal(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = make_snapshot_files(place, 1)
    may_seal = threading.Event()
    monkeypatch.setattr(slots, "failpoint", lambda label: may_seal.wait(20.0))
    kept, held = Kept(SnapshotDestinations((box[0], box[1]))), holdings(7.0)
    kept.begin(ABOUT, held, b"{}")
    kept.land()
    assert not kept.is_done
    assert inspect_slot(box[0]).reason.startswith("torn")
    expected = held[0].tensor.clone()
    held[0].tensor.add_(1.0)  # the optimizer
    may_seal.set()
    joined = kept.join()
    assert joined is not None
    assert joined.is_sealed
    assert joined.late_s >= joined.stall_s, "a copy that has landed when the step begins is no later than its start"
    assert torch.equal(recalled(box[0])["weight"], expected)
    kept.close()

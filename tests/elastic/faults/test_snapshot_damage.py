"""Damage to copies in memory: one bit of the newest, and a kill while one is written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from closeranks.capture.slots import (
    SealedSlot,
    SlotEntry,
    SlotHeader,
    SnapshotSlot,
    encode_entries,
    encode_index,
    inspect_slot,
)
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injector
from closeranks.elastic.faults.snapshot_damage import SlotHeaders, flip_bit, newest_sealed
from tests.capture.changes import changed
from tests.elastic.faults.worker_processes import FakeView, FakeWorker, until

NUM_BYTES = 3 << 20


def write(path: str, step: int, num_bytes: int = NUM_BYTES) -> None:
    """A sealed copy of two tensors with a gap between them, in which no flip would be noticed."""
    from crc32c import crc32c

    half = num_bytes // 2 - 64
    entries = [
        SlotEntry("model", name, (half,), (0,), (half,), None, "uint8", at, half)
        for name, at in (("a", 0), ("b", half + 64))
    ]
    slot = SnapshotSlot(path)
    slot.reserve(num_bytes, 4096)
    slot.invalidate()
    slot.data(num_bytes)[:] = np.random.default_rng(step).integers(0, 256, num_bytes, dtype=np.uint8)
    crcs = [crc32c(slot.data(num_bytes)[one.offset : one.offset + one.num_bytes]) for one in entries]
    slot.seal(SlotHeader(0, step, "image", 1), num_bytes, encode_index(encode_entries(entries), b"{}", crcs))
    slot.close()


@pytest.fixture
def box(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"own{number}") for number in range(2)]
    for path in paths:
        Path(path).touch()
    return paths


@pytest.mark.parametrize("seed", range(8))
def test_a_flip_changes_one_bit_of_the_newest_copy_and_is_noticed(box: list[str], seed: int) -> None:
    write(box[0], 7)
    write(box[1], 6)
    before = [Path(path).read_bytes() for path in box]
    newest = newest_sealed(box)
    assert newest is not None
    assert (newest.path, newest.step) == (box[0], 7)
    bit = flip_bit(newest, random.Random(seed))
    after = [Path(path).read_bytes() for path in box]
    assert after[1] == before[1]
    assert [place for place, (a, b) in enumerate(zip(before[0], after[0], strict=True)) if a != b] == [bit // 8]
    assert before[0][bit // 8] ^ after[0][bit // 8] == 1 << bit % 8
    assert inspect_slot(box[0]).header is not None, "header and index are whole"
    assert changed(box[0])


def test_where_nothing_is_sealed_nothing_is_flipped(box: list[str]) -> None:
    assert newest_sealed(box) is None


def test_headers_tell_what_is_being_written(box: list[str]) -> None:
    write(box[0], 1)
    headers = SlotHeaders(box)
    assert headers.are_torn() == (False, False)
    slot = SnapshotSlot(box[0])
    slot.reserve(NUM_BYTES, 4096)
    slot.invalidate()
    assert headers.are_torn() == (True, False)
    assert headers.is_writing(7), "it was sound a moment ago"
    assert headers.is_writing(0), "what is written over is of this generation"
    assert not headers.is_writing(7), "what an earlier one died in is not being written"
    slot.close()
    headers.close()


COPYING = """
import sys, time
from tests.elastic.faults.test_snapshot_damage import write
step, size = 0, int(sys.argv[3])
while True:
    write(sys.argv[1 + step % 2], step, size)
    step += 1
    if step == 2:
        print("up", flush=True)
    time.sleep(0.02)
"""


@contextmanager
def copying(box: list[str], num_bytes: int = NUM_BYTES) -> Iterator[subprocess.Popen[str]]:
    """A worker that writes its copies in turn, as fast as a short step would."""
    process = subprocess.Popen([sys.executable, "-c", COPYING, *box, str(num_bytes)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.world
def test_torn_kills_between_the_invalid_and_the_sealed_header(box: list[str]) -> None:
    with copying(box) as process, Injector([InjectedFault("torn", 1, 0)]) as injector:
        view = FakeView([FakeWorker(0, process.pid)], snapshot_paths=[box])

        def has_struck() -> bool:
            view.now = time.monotonic()
            injector(view)
            return bool(injector.injections)

        until(has_struck)
        assert process.wait(60) == -signal.SIGKILL
    states = [inspect_slot(path).reason for path in box]
    assert injector.injections[0].note == "SIGKILL while it copied, which left the copy torn"
    assert sorted(states) == ["", "torn: it was being written"], "the other copy is whole"


@pytest.mark.world
def test_bitflip_strikes_the_newest_copy_and_kills(box: list[str]) -> None:
    with copying(box, 1 << 16) as process, Injector([InjectedFault("bitflip", 1, 0)]) as injector:
        injector(FakeView([FakeWorker(0, process.pid)], snapshot_paths=[box]))
        assert process.wait(60) == -signal.SIGKILL
    sound = [path for path in box if not inspect_slot(path).reason]
    newest = max(sound, key=lambda path: SealedSlot(path).header.step)
    assert [bool(changed(path)) for path in sound] == [path == newest for path in sound]
    assert f"of the snapshot of step {SealedSlot(newest).header.step}" in injector.injections[0].note


def test_a_worker_without_boxes_cannot_be_struck_there() -> None:
    pid = os.getpid()
    with Injector([InjectedFault("torn", 1, 0)]) as injector:
        injector(FakeView([FakeWorker(0, pid)]))
        assert "keeps no snapshots" in injector.injections[0].error

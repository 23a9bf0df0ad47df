"""Targets and keepers for tests: a save whose outcome is looked at here, and a keeper with a capture of its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from closeranks.capture.capture import Capture, StateCopy
from closeranks.capture.capture_plan import CapturePlan
from closeranks.capture.slots import DATA_AT, SlotHeader, SnapshotSlot
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.format.digests import crc32c
from closeranks.checkpoint.format.manifest import Chunk
from closeranks.checkpoint.save.chunk_source import chunks_of_plan
from closeranks.checkpoint.save.saver import CheckpointSaver
from closeranks.core.errors import CheckpointError
from closeranks.elastic.snapshot_writer import SnapshotDestinations, SnapshotResult, SnapshotWriter


@dataclass(frozen=True)
class Captured:
    """What came of one copy."""

    chunks: tuple[Chunk, ...] = ()
    fd: int = -1
    problem: str = ""


class Taking:
    """What a save takes of the state, into a slot of its own."""

    def __init__(self, outcomes: list[Captured]) -> None:
        self.slots: Sequence[SnapshotSlot] = (SnapshotSlot(),)
        self.outcomes = outcomes

    def entries(self, plan: CapturePlan) -> Sequence[int]:
        return plan.saved

    def open(self, plan: CapturePlan) -> Sequence[int]:
        self.next_slots(plan)
        return plan.packed

    def on_half_copied(self) -> None: ...

    def finish(self, plan: CapturePlan, crcs: Sequence[int], copied: StateCopy) -> None:
        try:
            self.outcomes.append(Captured(chunks_of_plan(plan, crcs), self.slots[0].fd))
        except CheckpointError as error:
            self.fail(error.what, None)

    def fail(self, problem: str, error: BaseException | None) -> None:
        self.outcomes.append(Captured(problem=problem))

    def next_slots(self, plan: CapturePlan) -> Sequence[SnapshotSlot]:
        self.slots[0].reserve(plan.num_saved_bytes, 0)
        return self.slots


def stored(found: Captured) -> dict[str, bytes]:
    """By key: what lies in the slot, each chunk checked against its digest."""
    assert not found.problem
    with mmap.mmap(found.fd, os.fstat(found.fd).st_size, access=mmap.ACCESS_READ) as memory:
        values: dict[str, bytes] = {}
        offset = DATA_AT
        for chunk in found.chunks:
            data = memory[offset : offset + chunk.num_bytes]
            assert crc32c(data) == chunk.crc32c
            values[chunk.key] = values.get(chunk.key, b"") + data
            offset += chunk.num_bytes
    return values


class Kept:
    """A keeper, and the capture that fills its slots."""

    def __init__(self, berths: SnapshotDestinations) -> None:
        self.capture, self.keeper = Capture(), SnapshotWriter(berths)

    def begin(self, about: SlotHeader, tensors: Sequence[StateTensor], tree: bytes) -> None:
        self.capture.begin(tensors, self.keeper.snapshot(about, tree))

    def land(self) -> None:
        self.capture.wait_until_copied()

    @property
    def is_done(self) -> bool:
        return self.keeper.is_done

    def join(self) -> SnapshotResult | None:
        self.capture.wait_until_copied()
        return self.keeper.wait()

    def close(self) -> None:
        self.capture.close()
        self.keeper.close()


class TakingSaver(CheckpointSaver):
    """A saver with a capture of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capture = Capture()

    def take(self, step: int, tensors: Sequence[StateTensor], *args: Any, **options: Any) -> None:
        if targets := self.begin_save(step, *args, **options):
            self.capture.begin(tensors, targets)

    def make_ready(self, tensors: Sequence[StateTensor]) -> None:
        self.warm_up(self.capture, tensors)

    def land(self) -> float:
        return self.capture.wait_until_copied()

    def close(self) -> None:
        self.capture.close()
        super().close()

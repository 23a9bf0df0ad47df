"""Copies a rank's state into host memory while training continues: for recovery, for a checkpoint, or for both.

One background thread copies during the next forward and backward pass, which read the state but do not change it. It
writes every entry that a target wants into that target's slot and digests it in the same pass. A copy is **complete**
when its bytes are in host memory: ``wait_until_copied`` must be called before the vote of the very next step, since the
optimizer update that follows changes the state. The rest (digesting what a device sent, sealing a slot, sending it to a
writer) overlaps with training.

Tensors on an accelerator are copied on a stream of their own, directly into a slot once it is pinned
(``pinned_memory``).

Invariants: what forward may change is copied before ``begin`` returns; a tensor that was declared steady but changed
before the copy was complete fails every target, and is copied synchronously from then on; lack of memory fails only the
target that lacks it; no failure here is raised on the training thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from crc32c import crc32c
from torch import Tensor

from closeranks.capture.capture_plan import (
    BLOCK_BYTES,
    EMPTY_PLAN,
    CapturePlan,
    VersionCounterCheck,
    copy_and_digest,
    plan_capture,
    plan_signature,
)
from closeranks.capture.chunk_ranges import CHUNK_BYTES
from closeranks.capture.device_copy import CopiedBytes, CopyEvents, DeviceToHostCopier
from closeranks.capture.pinned_memory import PinnedMemory
from closeranks.capture.slots import DATA_AT, ByteArray, SnapshotSlot
from closeranks.capture.tensors import StateTensor
from closeranks.core.system.background_thread import BackgroundThread

_SLOW_BYTES_S = 5e8
"""Below this rate the copy mostly waits for the GIL between blocks: larger blocks wait less often."""


class CaptureTarget(Protocol):
    """Slots that a copy is written to, each with the same contents, and what to do with them afterwards.

    All methods but ``entries`` are called by the copying thread: ``open``, then ``finish``; ``fail`` instead of either,
    or after ``open``. If no copy could be started, ``fail`` is called by the training thread."""

    slots: Sequence[SnapshotSlot]

    def entries(self, plan: CapturePlan) -> Sequence[int]:
        """Indices of the plan's entries that this target takes, in plan order or in packed order."""
        ...

    def open(self, plan: CapturePlan) -> Sequence[int]:
        """Reserve memory; returns the offset of each of ``entries`` in a slot's data. ``OSError`` if there is none."""
        ...

    def on_half_copied(self) -> None:
        """Half of the bytes are copied."""
        ...

    def finish(self, plan: CapturePlan, crcs: Sequence[int], copied: StateCopy) -> None:
        """All bytes are copied; ``crcs``: CRC32C of each of ``entries``."""
        ...

    def fail(self, problem: str, error: BaseException | None) -> None:
        """The slots hold nothing usable. ``error``: the exception, if this was not an ordinary failure."""
        ...

    def next_slots(self, plan: CapturePlan) -> Sequence[SnapshotSlot]:
        """Slots that will be copied into next, with their memory reserved; ``OSError`` if memory is short."""
        ...


@dataclass
class StateCopy:
    """One copy of the state, in progress or done, and what it has cost so far."""

    plan: CapturePlan
    targets: Sequence[CaptureTarget]
    numbers: Sequence[int]
    """Indices of the entries that at least one target takes."""
    sources: list[Tensor]
    """The tensor that each of those is copied from."""
    ready: CopyEvents
    version_check: VersionCounterCheck
    copier: DeviceToHostCopier
    pending_targets: list[CaptureTarget] = field(init=False)
    """Targets for which neither ``finish`` nor ``fail`` was called yet."""
    begun_s: float = 0.0
    """Time that the training thread spent to start the copy."""
    stall_s: float = 0.0
    """How long training was blocked until the copy was complete."""
    send_s: float = 0.0
    """How long the device-to-host transfers took."""
    busy_s: float = 0.0
    """CPU time of the copying threads."""
    is_copied: threading.Event = field(default_factory=threading.Event)
    is_done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.pending_targets = list(self.targets)

    def keep_only(self, numbers: set[int]) -> None:
        """Drop all other entries: some targets failed, and the remaining ones take only these."""
        kept = [pair for pair in zip(self.numbers, self.sources, strict=True) if pair[0] in numbers]
        self.numbers, self.sources[:] = [number for number, _ in kept], [source for _, source in kept]

    def stall_so_far_s(self) -> float:
        """How long training would have been blocked if it had waited until now."""
        return self.copier.stall_s(self.ready)


class Capture:
    """Call sequence, on the training thread: ``begin`` after a step, ``wait_until_copied`` before the next vote;
    ``close``."""

    def __init__(self, num_threads: int = 4, background: BackgroundThread | None = None) -> None:
        """``num_threads`` threads digest what comes from a device and copy it to the remaining slots."""
        self._background = background or BackgroundThread("capture")
        self._pool = ThreadPoolExecutor(num_threads, "capture")  # starts threads only when they are needed
        self._copier = DeviceToHostCopier()
        self._pin_thread = BackgroundThread(
            "pin"
        )  # takes seconds per slot: copies into a pinned slot must not wait for another
        self._pinned_slots: dict[SnapshotSlot, PinnedMemory] = {}
        self._is_closing = threading.Event()
        self._plan, self._signature = EMPTY_PLAN, plan_signature(())
        self._tensors: Sequence[StateTensor] | None = None
        self._views: list[Tensor] = []
        self._steady: list[StateTensor] = []
        self._cloned: dict[int, StateTensor] = {}
        """Tensors that are copied synchronously in ``begin``, by index."""
        self._changed: set[str] = set()
        """Tensors declared steady that were found to change: copied synchronously from then on."""
        self._last: StateCopy | None = None

    def begin(self, tensors: Sequence[StateTensor], targets: Sequence[CaptureTarget]) -> None:
        """Start to copy these tensors; returns before the steady ones are copied. Passing the same list object again
        means the same tensors in the same memory."""
        self.join()
        try:
            self._begin(tensors, targets)
        except Exception as error:  # a tensor does not match its piece, or no thread can be started
            self._fail(targets, _in_words(error), error)

    def _begin(self, tensors: Sequence[StateTensor], targets: Sequence[CaptureTarget]) -> None:
        began_at = time.perf_counter()
        planned = self._planned(tensors)
        numbers = sorted(set[int]().union(*(target.entries(planned) for target in targets)))
        wanted = {planned.spans[at].tensor for at in numbers}
        clones = {n: one.tensor.detach().clone() for n, one in self._cloned.items() if n in wanted}
        sources = list[Tensor]()
        for at in numbers:
            span = planned.spans[at]
            sources.append(span.view_of(clones[span.tensor]) if span.tensor in clones else self._views[at])
        copied = StateCopy(
            planned, targets, numbers, sources, CopyEvents(sources), VersionCounterCheck(self._steady), self._copier
        )
        self._background.submit(lambda: self._run(copied))
        self._last = copied  # only now: if the task could not be queued, the wait would never end
        copied.begun_s = time.perf_counter() - began_at

    def wait_until_copied(self) -> float:
        """Wait until the last copy is complete: from then on the state may change. Returns the seconds waited."""
        if self._last is None or self._last.is_copied.is_set():
            return 0.0
        began_at = time.perf_counter()
        self._last.ready.record_fences()
        self._last.is_copied.wait()
        return time.perf_counter() - began_at

    @property
    def stall_s(self) -> float:
        """How long training was blocked in total for the last complete copy."""
        return self._last.begun_s + self._last.stall_s if self._last is not None else 0.0

    def join(self) -> None:
        """Wait until no copy is in progress in this process."""
        self.wait_until_copied()
        if self._last is not None:
            self._last.is_done.wait()

    def make_ready(self, tensors: Sequence[StateTensor], target: CaptureTarget) -> None:
        """Do in the background what the first copy into a target would wait for: allocate and pin its slots."""
        planned = self._planned(tensors)
        ready = CopyEvents(self._views)
        if ready.events:
            self._pin_thread.submit(lambda: self._pin_upcoming(target, planned, ready))
        else:
            threading.Thread(target=_populate_slots, args=(target, planned), name="touch", daemon=True).start()

    def num_saved_bytes(self, tensors: Sequence[StateTensor]) -> int:
        """How many bytes of these tensors this rank writes to a checkpoint."""
        return self._planned(tensors).num_saved_bytes

    def _planned(self, tensors: Sequence[StateTensor]) -> CapturePlan:
        """The plan, recomputed only when the tensors change: with many tensors, planning would slow every step."""
        if tensors is self._tensors:
            return self._plan
        now = plan_signature(tensors)
        if now != self._signature:
            self._plan, self._signature = plan_capture(tensors), now
        whole = [one.tensor.detach() for one in tensors]
        needs_clone = [
            not one.is_steady or one.key in self._changed or not one.tensor.is_contiguous() for one in tensors
        ]
        spans = self._plan.spans
        self._views = [whole[s.tensor] if needs_clone[s.tensor] else s.view_of(whole[s.tensor]) for s in spans]
        self._steady = [one for one, is_cloned in zip(tensors, needs_clone, strict=True) if not is_cloned]
        self._cloned = {
            n: one for n, (one, is_cloned) in enumerate(zip(tensors, needs_clone, strict=True)) if is_cloned
        }
        self._tensors = tensors
        return self._plan

    def close(self, timeout_s: float = 2.0) -> bool:
        """Returns whether nothing is in progress any more. A failing run must not wait long: a slot that is abandoned
        here is marked as torn."""
        self._is_closing.set()
        is_idle = self._last is None or self._last.is_done.wait(timeout_s)
        self._background.close(timeout_s if is_idle else 0.0)
        is_idle = self._pin_thread.close(timeout_s) and is_idle
        self._pool.shutdown(wait=False)
        while is_idle and self._pinned_slots:
            self._pinned_slots.popitem()[1].release()
        return is_idle

    # The methods below run on the background thread; pinning runs on a thread of its own.

    def _run(self, copied: StateCopy) -> None:
        began_s = time.thread_time()
        try:
            with copied.ready.device_guard():
                copied.ready.synchronize()
                self._copy(copied)
        except BaseException as error:  # training continues; each target decides what the failure means
            self._fail(copied.pending_targets, _in_words(error), error)
        finally:
            copied.sources.clear()
            copied.busy_s += time.thread_time() - began_s
            copied.is_copied.set()
            copied.is_done.set()
        if copied.ready.events and not self._is_closing.is_set():
            for target in copied.targets:
                self._pin_thread.submit(partial(self._pin_upcoming, target, copied.plan, copied.ready))

    def _copy(self, copied: StateCopy) -> None:
        places = dict[CaptureTarget, dict[int, int]]()
        for target in copied.targets:
            try:
                places[target] = dict(zip(target.entries(copied.plan), target.open(copied.plan), strict=True))
            except OSError as error:
                copied.pending_targets.remove(target)
                self._fail([target], f"there is no memory for copies of the state ({error.strerror})")
        if not places:
            return
        if len(places) < len(copied.targets):
            copied.keep_only(set[int]().union(*places.values()))
        first = max(places, key=lambda target: len(places[target]))  # the one that takes every copied entry
        pinned = self._pinned(first.slots[0], copied.ready)
        began_at = time.perf_counter()
        digests = (
            self._copy_through_buffer(copied, places)
            if pinned is None
            else self._copy_into_slot(copied, places, first, pinned)
        )
        if changed := copied.version_check.changed():
            self._changed.update(changed)
            self._tensors = None
            list(digests)  # wait for the threads that still read the slots, which the next copy overwrites
            copied.pending_targets.clear()
            self._fail(list(places), f"'{changed[0]}' changed while it was copied, and not by the optimizer")
            return
        copied.stall_s = copied.stall_so_far_s()
        copied.send_s = time.perf_counter() - began_at if copied.ready.events else 0.0
        copied.sources.clear()
        copied.is_copied.set()
        crcs = dict(zip(copied.numbers, digests, strict=True))
        for target, where in places.items():
            copied.pending_targets.remove(target)
            try:
                target.finish(copied.plan, [crcs[number] for number in where], copied)
            except BaseException as error:  # fails this target only: the others have their copies
                self._fail([target], _in_words(error), error)

    def _fail(self, targets: Sequence[CaptureTarget], problem: str, error: BaseException | None = None) -> None:
        for target in targets:
            target.fail(problem, error)

    def _copy_through_buffer(self, copied: StateCopy, places: dict[CaptureTarget, dict[int, int]]) -> Iterable[int]:
        """Copy every entry with the CPU into every slot; returns the digests."""
        entries, numbers = copied.plan.entries, copied.numbers
        crcs = [0] * len(numbers)
        blocks = _Blocks()

        def copy(one: CopiedBytes) -> None:
            targets = list(_slot_ranges(places, numbers[one.number], copied.plan))
            copy_one = copy_and_digest if copied.ready.events else blocks.copy
            crcs[one.number] = copy_one(one.data, targets)

        several = self._pool.map if copied.ready.events else map  # a device sends faster than one core can digest
        half = len(numbers) // 2
        for batch in self._copier.copy_through_buffer(copied.sources, copied.ready):
            for target, where in places.items():
                ends = [where[n] + entries[n].num_bytes for one in batch if (n := numbers[one.number]) in where]
                for slot in target.slots:
                    slot.populate(max(ends, default=0))
            list(several(copy, batch))
            if batch[0].number <= half <= batch[-1].number:
                _report_half_copied(places)
        return crcs

    def _copy_into_slot(
        self, copied: StateCopy, places: dict[CaptureTarget, dict[int, int]], first: CaptureTarget, pinned: PinnedMemory
    ) -> Iterable[int]:
        """Let the devices copy every entry into the first slot by DMA. Returns an iterator over the digests: reading it
        waits until each entry is digested and copied to the other slots."""
        numbers = copied.numbers
        for slot in (slot for target in places for slot in target.slots if slot is not first.slots[0]):
            slot.populate_all(self._pool.map)
        ordered = {first: places[first], **places}
        pending: list[Future[int]] = []
        where = [(places[first][number], copied.plan.entries[number].num_bytes) for number in numbers]
        for arrived in self._copier.copy_into_slot(pinned, copied.sources, where):
            for at in arrived:
                source, *others = _slot_ranges(ordered, numbers[at], copied.plan)
                pending.append(self._pool.submit(self._digest, copied, source, others))
            if arrived and arrived[0] <= len(numbers) // 2 <= arrived[-1]:
                _report_half_copied(places)
        return (one.result() for one in pending)

    def _digest(self, copied: StateCopy, source: ByteArray, targets: Sequence[ByteArray]) -> int:
        began_s = time.thread_time()
        crc = copy_and_digest(source, targets)
        copied.busy_s += time.thread_time() - began_s  # not atomic, so slightly inexact: it is only an estimate
        return crc

    def _pinned(self, slot: SnapshotSlot, ready: CopyEvents) -> PinnedMemory | None:
        """The memory of a reserved slot if a device can copy into it directly, else None. The first call for a slot
        is slow."""
        if not ready.events:
            return None
        with slot.lock:
            known = self._pinned_slots.get(slot)
            if known is None or known.memory is not slot.bytes:
                if known is not None:
                    known.release()
                known = self._pinned_slots[slot] = PinnedMemory(slot.bytes)
                slot.populate_all(self._pool.map)
                with ready.device_guard():
                    known.pin(self._is_closing)
        return known if known.is_pinned else None

    def _pin_upcoming(self, target: CaptureTarget, plan: CapturePlan, ready: CopyEvents) -> None:
        """Pin slots before they are needed, the next one first. Lack of memory is reported by the next copy."""
        with suppress(OSError):
            for slot in target.next_slots(plan):
                if not self._is_closing.is_set():
                    self._pinned(slot, ready)


def _slot_ranges(places: dict[CaptureTarget, dict[int, int]], number: int, plan: CapturePlan) -> Iterator[ByteArray]:
    """The memory for an entry in every slot that takes it."""
    for target, where in places.items():
        if number in where:
            begin = DATA_AT + where[number]
            for slot in target.slots:
                yield slot.bytes[begin : begin + plan.entries[number].num_bytes]


def _report_half_copied(targets: Iterable[CaptureTarget]) -> None:
    for target in targets:
        target.on_half_copied()


def _populate_slots(target: CaptureTarget, plan: CapturePlan) -> None:
    """Allocate the memory of slots at the lowest CPU priority. Lack of memory is reported by the first copy."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # affects this thread only
    with suppress(OSError):
        for slot in target.next_slots(plan):
            slot.populate_all(map)


def _in_words(error: BaseException) -> str:
    return f"the state cannot be copied: {type(error).__name__}: {error}"


@dataclass
class _Blocks:
    """Adaptive block size of the copy: it grows while the GIL is contended."""

    num_bytes: int = BLOCK_BYTES

    def copy(self, source: ByteArray, targets: Sequence[ByteArray]) -> int:
        """Copy and return the CRC32C of the source; each block is copied while it is still in the cache."""
        crc = start = 0
        while start < len(source):
            began_at = time.perf_counter()
            block = slice(start, min(start + self.num_bytes, len(source)))
            crc = crc32c(source[block].data, crc)
            for target in targets:
                np.copyto(target[block], source[block])
            elapsed_s = time.perf_counter() - began_at
            if elapsed_s * _SLOW_BYTES_S > block.stop - block.start >= BLOCK_BYTES:
                self.num_bytes = min(2 * self.num_bytes, CHUNK_BYTES)
            start = block.stop
        return crc

"""Copies tensors from an accelerator to host memory without stalling training.

Copies run on a stream of their own, which starts when the state is complete on the training stream. They go directly
into a pinned slot or, where slots cannot be pinned, through a double-buffered pinned staging area: while a device fills
one half, the other half is digested and copied into slots. Invariants: the training thread only waits until a copy
is complete and, where it must, sealed; no part of the state is overwritten before it has arrived. Tensors on the CPU
need none of this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from closeranks.capture.capture_plan import tensor_bytes
from closeranks.capture.pinned_memory import PinnedMemory
from closeranks.capture.slots import DATA_AT, ByteArray

HALF_BYTES = 64 << 20
_BATCH_BYTES = 256 << 20
"""Bytes copied directly into a slot between two events: what has arrived is digested while the rest is in transit."""


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """The bytes of source ``number`` in host memory; valid until the next batch is requested."""

    number: int
    data: ByteArray


class CopyEvents:
    """CUDA events around a copy, per device: one when the state is complete, one when training wants to change it."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.events: dict[torch.device, torch.cuda.Event] = {}
        self.fences: dict[torch.device, torch.cuda.Event] = {}
        self.asked_at: float | None = None
        for device in {source.device for source in sources if source.is_cuda}:
            # Blocking: a thread that waits for it sleeps instead of spinning.
            self.events[device] = torch.cuda.Event(blocking=True)
            self.events[device].record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        """Wait until the state is complete; not to be called on the training thread."""
        for event in self.events.values():
            event.synchronize()

    def record_fences(self) -> None:
        """Training is blocked on the copy from now on, or from when its devices finish the work queued so far."""
        if self.asked_at is None:
            for device in self.events:
                self.fences[device] = torch.cuda.Event(enable_timing=True)
                self.fences[device].record(torch.cuda.current_stream(device))
            self.asked_at = time.perf_counter()

    def device_guard(self) -> AbstractContextManager[object]:
        """Selects the state's device: a new thread starts on device 0, where any CUDA call would allocate memory."""
        device = next(iter(self.events), None)
        return nullcontext() if device is None else torch.cuda.device(device)


class DeviceToHostCopier:
    """Copies tensors to the host in order. Costs twice ``HALF_BYTES`` of pinned memory where it needs the staging
    buffer."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._halves: list[Tensor] = []

    def stall_s(self, ready: CopyEvents) -> float:
        """How long training has been blocked so far: 0 while a device still computes, since nothing is lost then."""
        if ready.asked_at is None:
            return 0.0
        late_s = [time.perf_counter() - ready.asked_at]
        for device, fence in ready.fences.items():
            if not fence.query():
                return 0.0
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._stream(device))
            now.synchronize()
            late_s.append(fence.elapsed_time(now) / 1000)
        return max(0.0, min(late_s))

    def copy_into_slot(
        self, pinned: PinnedMemory, sources: Sequence[Tensor], places: Sequence[tuple[int, int]]
    ) -> Iterator[list[int]]:
        """Copy directly into a slot, after ``CopyEvents.synchronize``; yields the indices of the sources that have
        arrived. All copies are queued before the first yield. ``places``: offset in the slot's data and length of
        each."""
        batches: list[tuple[list[int], list[torch.cuda.Event]]] = []
        batch, num_bytes, devices = list[int](), 0, {source.device for source in sources if source.is_cuda}
        for number, (source, place) in enumerate(zip(sources, places, strict=True)):
            self._copy_to_slot(pinned, source, *place)
            batch.append(number)
            num_bytes += place[1]
            if num_bytes >= _BATCH_BYTES or number == len(places) - 1:
                batches.append((batch, [self._marked(device) for device in devices]))
                batch, num_bytes = [], 0
        for numbers, events in batches:
            for event in events:
                event.synchronize()
            yield numbers

    def _copy_to_slot(self, pinned: PinnedMemory, source: Tensor, offset: int, num_bytes: int) -> None:
        begin = DATA_AT + offset
        if not source.is_cuda:
            np.copyto(pinned.memory[begin : begin + num_bytes], tensor_bytes(source))
            return
        with torch.cuda.stream(self._stream(source.device)):
            data = source.contiguous().view(-1).view(torch.uint8)
            for start, stop in pinned.copy_ranges(begin, begin + num_bytes):
                place = torch.from_numpy(pinned.memory[start:stop])
                place.copy_(data[start - begin : stop - begin], non_blocking=True)

    def copy_through_buffer(self, sources: Sequence[Tensor], ready: CopyEvents) -> Iterator[list[CopiedBytes]]:
        """Copy in batches, after ``CopyEvents.synchronize``; no source on a device may have more than
        ``HALF_BYTES``."""
        if not ready.events:
            yield from ([CopiedBytes(number, tensor_bytes(source))] for number, source in enumerate(sources))
            return
        if not self._halves:
            self._halves = [torch.empty(HALF_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        before: tuple[list[CopiedBytes], list[torch.cuda.Event]] | None = None
        for batch_number, numbers in enumerate(_batches(sources)):
            sent = self._copy_to_half(sources, numbers, self._halves[batch_number % 2])
            if before is not None:
                yield _when_copied(*before)
            before = sent
        if before is not None:
            yield _when_copied(*before)

    def _copy_to_half(
        self, sources: Sequence[Tensor], numbers: Sequence[int], half: Tensor
    ) -> tuple[list[CopiedBytes], list[torch.cuda.Event]]:
        copied, devices, at = [], set(), 0
        for number in numbers:
            source = sources[number]
            if not source.is_cuda:
                copied.append(CopiedBytes(number, tensor_bytes(source)))
                continue
            devices.add(source.device)
            num_bytes = source.numel() * source.element_size()
            target = half[at : at + num_bytes]
            with torch.cuda.stream(self._stream(source.device)):
                target.copy_(source.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            copied.append(CopiedBytes(number, tensor_bytes(target)))
            at += -(-num_bytes // 16) * 16
        return copied, [self._marked(device) for device in devices]

    def _marked(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream(device))
        return event

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _when_copied(copied: list[CopiedBytes], events: Sequence[torch.cuda.Event]) -> list[CopiedBytes]:
    for event in events:
        event.synchronize()
    return copied


def _batches(sources: Sequence[Tensor]) -> Iterator[list[int]]:
    """Groups of sources that fit into half of the staging buffer."""
    batch: list[int] = []
    room = HALF_BYTES
    for number, source in enumerate(sources):
        num_bytes = -(-source.numel() * source.element_size() // 16) * 16 if source.is_cuda else 0
        if num_bytes > room:
            yield batch
            batch, room = [], HALF_BYTES
        batch.append(number)
        room -= num_bytes
    if batch:
        yield batch

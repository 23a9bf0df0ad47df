"""How do tensors of an accelerator come to the host without holding up training?

On a stream of their own, which begins when the state is complete on the training stream: straight into a slot that is
pinned or, where none can be, through pinned memory whose two halves take turns: while a device fills one, the other is
digested and copied into slots. Invariants: the training thread waits for nothing but a copy's landing, and where it
must its seal; nothing of the state is overwritten before it has arrived. For tensors of the CPU all of this comes to
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from closeranks.capture.pinning import Pinned
from closeranks.capture.plan import octets
from closeranks.capture.slots import DATA_AT, Octets

HALF_BYTES = 64 << 20
_FLIGHT_BYTES = 256 << 20
"""Sent straight into a slot between two events: what has landed is digested while the rest is under way."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The bytes of source ``number``, on the host; valid until the next batch is asked for."""

    number: int
    data: Octets


class Ready:
    """The moments at which the state is complete, on every device it lies on, and at which training wants to change
    it."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.events: dict[torch.device, torch.cuda.Event] = {}
        self.fences: dict[torch.device, torch.cuda.Event] = {}
        self.asked_at: float | None = None
        for device in {source.device for source in sources if source.is_cuda}:
            # Blocking: who waits for it sleeps instead of turning a processor.
            self.events[device] = torch.cuda.Event(blocking=True)
            self.events[device].record(torch.cuda.current_stream(device))

    def reach(self) -> None:
        """Wait until the state is complete; not on the thread that trains."""
        for event in self.events.values():
            event.synchronize()

    def ask(self) -> None:
        """Training needs the copy now, or when its devices are done with what they were told so far."""
        if self.asked_at is None:
            for device in self.events:
                self.fences[device] = torch.cuda.Event(enable_timing=True)
                self.fences[device].record(torch.cuda.current_stream(device))
            self.asked_at = time.perf_counter()

    def entered(self) -> AbstractContextManager[object]:
        """A new thread stands on the first device of all, and whatever it asks of CUDA would take memory there."""
        device = next(iter(self.events), None)
        return nullcontext() if device is None else torch.cuda.device(device)


class Ferry:
    """Brings tensors to the host, in their order. Costs twice ``HALF_BYTES`` of pinned memory where it must go through
    that."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._halves: list[Tensor] = []

    def lateness(self, ready: Ready) -> float:
        """For how long training has been standing still by now. While a device still computes it loses nothing."""
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

    def land_in(
        self, pinned: Pinned, sources: Sequence[Tensor], places: Sequence[tuple[int, int]]
    ) -> Iterator[list[int]]:
        """Straight into a slot, once the state is ``reach``ed; the numbers of those that have arrived. All are on
        their way before the first is told. ``places``: offset in the slot's data and length of each."""
        flights: list[tuple[list[int], list[torch.cuda.Event]]] = []
        flight, num_bytes, devices = list[int](), 0, {source.device for source in sources if source.is_cuda}
        for number, (source, place) in enumerate(zip(sources, places, strict=True)):
            self._send_in(pinned, source, *place)
            flight.append(number)
            num_bytes += place[1]
            if num_bytes >= _FLIGHT_BYTES or number == len(places) - 1:
                flights.append((flight, [self._marked(device) for device in devices]))
                flight, num_bytes = [], 0
        for numbers, events in flights:
            for event in events:
                event.synchronize()
            yield numbers

    def _send_in(self, pinned: Pinned, source: Tensor, offset: int, num_bytes: int) -> None:
        begin = DATA_AT + offset
        if not source.is_cuda:
            np.copyto(pinned.memory[begin : begin + num_bytes], octets(source))
            return
        with torch.cuda.stream(self._stream(source.device)):
            data = source.contiguous().view(-1).view(torch.uint8)
            for start, stop in pinned.cuts(begin, begin + num_bytes):
                place = torch.from_numpy(pinned.memory[start:stop])
                place.copy_(data[start - begin : stop - begin], non_blocking=True)

    def land(self, sources: Sequence[Tensor], ready: Ready) -> Iterator[list[Landed]]:
        """In batches, once the state is ``reach``ed; no source of a device may have more than ``HALF_BYTES``."""
        if not ready.events:
            yield from ([Landed(number, octets(source))] for number, source in enumerate(sources))
            return
        if not self._halves:
            self._halves = [torch.empty(HALF_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        before: tuple[list[Landed], list[torch.cuda.Event]] | None = None
        for turn, numbers in enumerate(_batches(sources)):
            sent = self._send_off(sources, numbers, self._halves[turn % 2])
            if before is not None:
                yield _arrived(*before)
            before = sent
        if before is not None:
            yield _arrived(*before)

    def _send_off(
        self, sources: Sequence[Tensor], numbers: Sequence[int], half: Tensor
    ) -> tuple[list[Landed], list[torch.cuda.Event]]:
        landed, devices, at = [], set(), 0
        for number in numbers:
            source = sources[number]
            if not source.is_cuda:
                landed.append(Landed(number, octets(source)))
                continue
            devices.add(source.device)
            num_bytes = source.numel() * source.element_size()
            target = half[at : at + num_bytes]
            with torch.cuda.stream(self._stream(source.device)):
                target.copy_(source.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            landed.append(Landed(number, octets(target)))
            at += -(-num_bytes // 16) * 16
        return landed, [self._marked(device) for device in devices]

    def _marked(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream(device))
        return event

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _arrived(landed: list[Landed], events: Sequence[torch.cuda.Event]) -> list[Landed]:
    for event in events:
        event.synchronize()
    return landed


def _batches(sources: Sequence[Tensor]) -> Iterator[list[int]]:
    """As many at a time as fit a half."""
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

"""How do tensors of an accelerator come to the host without holding up training?

On a stream of their own, which begins when the state is complete on the training stream, through pinned memory whose
two halves take turns: while a device fills one, the other is digested and copied into slots. Invariants: the training
thread waits for nothing but ``Ready.wait``; nothing of the state is overwritten before it has arrived, since training
goes on past it only when all of it has. For tensors of the CPU all of this comes to nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.elastic.slots import Octets
from closeranks.elastic.sources import octets

HALF_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Landed:
    """The bytes of source ``number``, on the host; valid until the next batch is asked for."""

    number: int
    data: Octets


class Ready:
    """The moment at which the state is complete, on every device it lies on."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.events: dict[torch.device, torch.cuda.Event] = {}
        for device in {source.device for source in sources if source.is_cuda}:
            # Blocking: who waits for it sleeps instead of turning a processor.
            self.events[device] = torch.cuda.Event(blocking=True)
            self.events[device].record(torch.cuda.current_stream(device))

    def reach(self) -> None:
        """Wait until the state is complete; not on the thread that trains."""
        for event in self.events.values():
            event.synchronize()

    def wait(self, is_done: threading.Event) -> float:
        """Until the copy is done; seconds that training lost by it. While a device still computes it loses nothing."""
        if is_done.is_set():
            return 0.0
        fences = [torch.cuda.Event() for _ in self.events]
        for fence, device in zip(fences, self.events, strict=True):
            fence.record(torch.cuda.current_stream(device))
        began_at = time.perf_counter()
        is_done.wait()
        is_idle = all(fence.query() for fence in fences)
        return time.perf_counter() - began_at if is_idle else 0.0

    def entered(self) -> AbstractContextManager[object]:
        """A new thread stands on the first device of all, and whatever it asks of CUDA would take memory there."""
        device = next(iter(self.events), None)
        return nullcontext() if device is None else torch.cuda.device(device)


class Bounce:
    """Brings tensors to the host, in their order. Costs twice ``HALF_BYTES`` of pinned memory where there are any."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._halves: list[Tensor] = []

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
        events = [torch.cuda.Event(blocking=True) for _ in devices]
        for event, device in zip(events, devices, strict=True):
            event.record(self._stream(device))
        return landed, events

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

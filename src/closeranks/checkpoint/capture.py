"""How is the state of a rank copied while training goes on, so that what is saved is what it was?

One thread copies into shared memory during the next forward and backward, which read the state but do not change it;
``join`` comes before the optimizer does. It takes no lock of the interpreter's while it copies: block by block it
digests a tensor's own memory (CRC32C) and copies it while it is still in the processor's cache. From a CUDA device the
copies run on a stream of their own; there ``join`` makes the training stream wait for them on the device, not the
host, and digests are taken of what arrived.

Invariants: what forward may change is copied before ``begin`` returns; a tensor that was to be steady and changed
before ``join`` is a ``problem``, never a copy; nothing of a failure here reaches the thread that trains. Costs one copy
of this rank's share in shared memory, for good; a second one in pinned memory where CUDA refuses to pin shared memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.buffer import Buffer
from closeranks.checkpoint.digests import crc32c
from closeranks.checkpoint.manifest import CHUNK_BYTES, Chunk
from closeranks.checkpoint.sources import Array, Plan, Slot, Watch, elements, host_bytes, plan, signature
from closeranks.core.background import Background
from closeranks.core.faults import declare, point

BLOCK_BYTES = 1 << 20
"""Digested and copied at a time: fits a core's second-level cache."""
_SLOW_BYTES_S = 5e8
"""Below this rate the interpreter's lock is what is waited for, between blocks: larger ones wait less often."""

BEGUN = declare("capture.begun", "a save was asked for, and the state is about to be copied")
COPIED = declare("capture.copied", "the copy is complete; the writer does not know of it yet")


@dataclass(frozen=True, slots=True)
class Captured:
    """A complete copy: ``chunks`` back to back in the memory behind ``fd``; or ``problem`` says why there is none."""

    chunks: tuple[Chunk, ...] = ()
    fd: int = -1
    seconds: float = 0.0
    """From ``begin`` to the last digest."""
    problem: str = ""


@dataclass
class _Task:
    """One copy under way. ``sources`` keeps tensors alive until they are copied."""

    plan: Plan
    sources: dict[int, Tensor]
    ready: dict[torch.device, torch.cuda.Event]
    """Of each CUDA device: the state is complete on the training stream."""
    watch: Watch
    then: Callable[[Captured], None]
    began_at: float
    is_taken: threading.Event = field(default_factory=threading.Event)
    """The host need not wait any more; devices have ``copied`` to wait for."""
    copied: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    changed: str = ""
    """A tensor that changed too early."""
    changed_at_join: str | None = None
    """As ``join`` found it, which comes before devices are done copying; None while nobody joined."""

    @property
    def device(self) -> torch.device | None:
        """One that it copies from."""
        return next(iter(self.ready), None)


class Capture:
    """Call sequence, on the thread that trains: ``warm`` if there is time before the first save; then ``begin`` and
    ``join`` for each, never a ``begin`` while somebody still reads the buffer; ``close``."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._buffer = Buffer()
        self._bounce: Tensor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._plan, self._signature = Plan(()), signature(())
        self._task: _Task | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._restless: set[str] = set()
        """What was said to be steady and was found to change: from then on it is copied at once."""

    def warm(self, items: Sequence[StateTensor]) -> None:
        """Give the buffer its memory in the background, before the first save needs it."""
        num_bytes = self._planned(items).num_bytes
        device = next((item.tensor.device for item in items if item.tensor.is_cuda), None)
        self._background.do(lambda: self._warm(num_bytes, device))

    def begin(self, items: Sequence[StateTensor], then: Callable[[Captured], None]) -> None:
        """Copy these; ``then`` is called with the outcome, on the background's thread. Raises ``CheckpointError`` for
        items that cannot be saved, before anything is copied, and ``RuntimeError`` where no thread can copy."""
        planned = self._planned(items)
        began_at = time.perf_counter()
        used = sorted({slot.item for slot in planned.slots})
        # Detached: a parameter that is given other memory meanwhile does not take its source along.
        sources = {n: items[n].tensor.detach() for n in used}
        steady = {n for n in used if items[n].is_steady and items[n].key not in self._restless}
        sources |= {n: sources[n].clone() for n in used if n not in steady}
        watch = Watch(items[n] for n in used if n in steady)
        ready = {}
        for device in {tensor.device for tensor in sources.values() if tensor.is_cuda}:
            ready[device] = torch.cuda.Event()
            ready[device].record(torch.cuda.current_stream(device))
        self._waits = []
        point(BEGUN)
        task = _Task(planned, sources, ready, watch, then, began_at)
        self._background.do(lambda: self._run(task))
        self._task = task  # only now: for a task that nobody runs, join would wait for ever

    def join(self) -> float:
        """From here on the state may change; seconds that the host waited. Nothing of the copy's is raised."""
        task, self._task = self._task, None
        if task is None:
            return 0.0
        began_at = time.perf_counter()
        task.is_taken.wait()
        if task.copied:  # under way, maybe; from here on changes are no concern of theirs
            task.changed_at_join = task.watch.changed()
        for device, event in task.copied.items():
            stream = torch.cuda.current_stream(device)
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record(stream)
            stream.wait_event(event)
            after.record(stream)
            self._waits.append((before, after))
        return time.perf_counter() - began_at

    @property
    def device_wait_s(self) -> float:
        """How long training streams waited for the last copy, which the host did not see; 0 while they still do."""
        waits: list[float] = [before.elapsed_time(after) for before, after in self._waits if after.query()]
        return sum(waits) / 1e3

    def close(self) -> None:
        """Nobody may be copying or reading."""
        self._buffer.close()
        self._bounce = None

    def _planned(self, items: Sequence[StateTensor]) -> Plan:
        """Made once for the same items: a save plans nothing that the last one did not plan."""
        now = signature(items)
        if now != self._signature:
            self._plan, self._signature = plan(items), now
        return self._plan

    # What follows runs on the background's thread.

    def _warm(self, num_bytes: int, device: torch.device | None) -> None:
        with _current(device):
            if self._make_room(num_bytes, device) and device is None:
                self._buffer.prefault()

    def _run(self, task: _Task) -> None:
        try:
            with _current(task.device):
                crcs = self._copy(task)
            chunks = tuple(replace(slot.chunk, crc32c=crc) for slot, crc in zip(task.plan.slots, crcs, strict=True))
            point(COPIED)
            captured = Captured(chunks, self._buffer.fd, time.perf_counter() - task.began_at)
            if task.changed:
                self._restless.add(task.changed)
                captured = Captured(problem=f"'{task.changed}' changed while it was copied")
        except Exception as error:  # whatever it is: training goes on, and the save is reported as failed
            self._settle(task)
            captured = Captured(problem=f"the state could not be copied: {type(error).__name__}: {error}")
        finally:
            task.is_taken.set()
        task.sources.clear()
        task.then(captured)

    def _copy(self, task: _Task) -> list[int]:
        """The digest of each slot's bytes, in order."""
        self._make_room(task.plan.num_bytes, task.device)
        self._buffer.stop_prefault()
        landing = self._buffer.bytes if self._bounce is None else self._bounce
        arrivals = dict(self._send_off(task, landing))
        target = host_bytes(self._buffer.bytes)
        crcs: dict[int, int] = {}
        blocks = _Blocks()
        for number, slot in enumerate(task.plan.slots):
            if number not in arrivals:
                source = elements(task.sources[slot.item], slot.first, slot.last)
                crcs[number] = blocks.copy(host_bytes(source), target[_span(slot)])
        task.changed = task.watch.changed()
        task.is_taken.set()
        for number, event in arrivals.items():
            event.synchronize()
            span = _span(task.plan.slots[number])
            crcs[number] = blocks.copy(host_bytes(landing)[span], target[span])
        # In this order: what is read before anybody joined holds, what is read later may be the optimizer's doing.
        found = task.watch.changed() if arrivals else ""
        task.changed = task.changed or (found if task.changed_at_join is None else task.changed_at_join)
        return [crcs[number] for number in range(len(task.plan.slots))]

    def _make_room(self, num_bytes: int, device: torch.device | None) -> bool:
        """Whether the buffer had to grow. Devices copy into it, or into a second one that CUDA pins more willingly."""
        has_grown = self._buffer.reserve(num_bytes)
        if device is None or self._buffer.pin():
            self._bounce = None
        elif self._bounce is None or self._bounce.numel() < num_bytes:
            self._bounce = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return has_grown

    def _send_off(self, task: _Task, landing: Tensor) -> Iterator[tuple[int, torch.cuda.Event]]:
        """Start the copies from devices: each slot's number, and when it has arrived."""
        for device, ready in task.ready.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                for number, slot in enumerate(task.plan.slots):
                    source = task.sources[slot.item]
                    if source.device == device:
                        source = elements(source, slot.first, slot.last)
                        landing[_span(slot)].copy_(source, non_blocking=True)
                        # Blocking: who waits for it sleeps instead of turning a processor.
                        task.copied[device] = torch.cuda.Event(blocking=True)
                        task.copied[device].record(stream)
                        yield number, task.copied[device]

    def _settle(self, task: _Task) -> None:
        """After a failure: no device may still copy when the tensors are let go."""
        for device in task.ready:
            if device in self._streams:
                with suppress(RuntimeError):  # what broke first is told; a broken device says the same of everything
                    self._streams[device].synchronize()


@dataclass
class _Blocks:
    """How much is copied at a time: more and more while the interpreter's lock is hard to get."""

    num_bytes: int = BLOCK_BYTES

    def copy(self, source: Array, target: Array) -> int:
        """CRC32C of the source; the copy follows while the block is still in the cache."""
        crc = start = 0
        has_arrived = source.ctypes.data == target.ctypes.data
        while start < len(source):
            began_at = time.perf_counter()
            block = slice(start, min(start + self.num_bytes, len(source)))
            crc = crc32c(source[block].data, crc)
            if not has_arrived:
                np.copyto(target[block], source[block])
            elapsed_s = time.perf_counter() - began_at
            if elapsed_s * _SLOW_BYTES_S > block.stop - block.start >= BLOCK_BYTES:
                self.num_bytes = min(2 * self.num_bytes, CHUNK_BYTES)
            start = block.stop
        return crc


def _current(device: torch.device | None) -> AbstractContextManager[object]:
    """A new thread stands on the first device of all, and whatever it asks of CUDA would take memory there."""
    return nullcontext() if device is None else torch.cuda.device(device)


def _span(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.chunk.num_bytes)

"""Copies a rank's state into memory of the host while training goes on: for recovery, for a checkpoint, or for both.

One thread copies during the next forward and backward, which read the state but do not change it: every entry that a
target wants into that target's slot, digested in the same pass. A copy has **landed** when its bytes are on the host:
``land`` comes before the vote of the very next step, since the update that follows changes the state. What follows
(digesting what a device sent, sealing a slot, handing it to a writer) happens while training goes on.

From an accelerator, tensors travel on a stream of their own, straight into a slot once it is pinned (``pinning``).

Invariants: what forward may change is copied before ``begin`` returns; a tensor that was to be steady and changed
before it landed fails every target, and is copied at once from then on; lack of memory fails the target that lacks it
and no other; nothing that fails here is raised on the thread that trains.
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

from closeranks.capture.devices import Ferry, Landed, Ready
from closeranks.capture.pinning import Pinned
from closeranks.capture.plan import BLOCK_BYTES, NOTHING, Plan, Watch, copy_and_digest, plan, signature
from closeranks.capture.shares import CHUNK_BYTES
from closeranks.capture.slots import DATA_AT, Octets, Slot
from closeranks.capture.tensors import StateTensor
from closeranks.core.background import Background

_SLOW_BYTES_S = 5e8
"""Below this rate the interpreter's lock is what is waited for, between blocks: larger ones wait less often."""


class Target(Protocol):
    """Slots that a copy goes into, all of them alike, and what is done with them then.

    But for ``entries``, called by the copying thread: ``open``, then ``finish``; ``fail`` instead of either, or after
    ``open``. Where no copy could be begun, ``fail`` is called by the thread that trains."""

    slots: Sequence[Slot]

    def entries(self, plan: Plan) -> Sequence[int]:
        """The numbers of those that it takes, in the order of the plan or packed."""
        ...

    def open(self, plan: Plan) -> Sequence[int]:
        """Make room, and where each of ``entries`` goes in a slot's data; ``OSError`` where there is no memory."""
        ...

    def halfway(self) -> None:
        """Half of the bytes are copied."""
        ...

    def finish(self, plan: Plan, crcs: Sequence[int], copied: Copied) -> None:
        """All bytes are in their place; ``crcs``: CRC32C of each of ``entries``."""
        ...

    def fail(self, problem: str, error: BaseException | None) -> None:
        """Nothing that can be used is in the slots. ``error``: where it was no ordinary failure."""
        ...

    def upcoming(self, plan: Plan) -> Sequence[Slot]:
        """Slots that will be copied into next, with their memory; ``OSError`` where there is none."""
        ...


@dataclass
class Copied:
    """One copy, and what it cost so far."""

    plan: Plan
    targets: Sequence[Target]
    numbers: Sequence[int]
    """The entries that any target takes."""
    sources: list[Tensor]
    """Of each of those."""
    ready: Ready
    watch: Watch
    ferry: Ferry
    untold: list[Target] = field(init=False)
    """Targets that do not know yet what became of it."""
    begun_s: float = 0.0
    """Spent by the thread that trains."""
    stall_s: float = 0.0
    """How long training stood still until it had landed."""
    send_s: float = 0.0
    """How long devices took to send what lies on them."""
    busy_s: float = 0.0
    """Processor time of the copying threads."""
    has_landed: threading.Event = field(default_factory=threading.Event)
    is_done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.untold = list(self.targets)

    def keep_only(self, numbers: set[int]) -> None:
        """Fewer targets are left, which take no more than these."""
        kept = [pair for pair in zip(self.numbers, self.sources, strict=True) if pair[0] in numbers]
        self.numbers, self.sources[:] = [number for number, _ in kept], [source for _, source in kept]

    def lateness(self) -> float:
        """How long training would have stood still by now, had it waited until now."""
        return self.ferry.lateness(self.ready)


class Capture:
    """Call sequence, on the thread that trains: ``begin`` after a commit, ``land`` before the next vote; ``close``."""

    def __init__(self, num_threads: int = 4, background: Background | None = None) -> None:
        """``num_threads`` digest, and copy to further slots, what comes from a device."""
        self._background = background or Background("capture")
        self._crew = ThreadPoolExecutor(num_threads, "capture")  # starts none before it is needed
        self._ferry = Ferry()
        self._pinner = Background("pin")  # seconds a slot: a copy into one that is pinned must not wait for another
        self._pins: dict[Slot, Pinned] = {}
        self._is_closing = threading.Event()
        self._plan, self._signature = NOTHING, signature(())
        self._tensors: Sequence[StateTensor] | None = None
        self._views: list[Tensor] = []
        self._steady: list[StateTensor] = []
        self._hasty: dict[int, StateTensor] = {}
        """What is copied at once, by its number."""
        self._restless: set[str] = set()
        """What was said to be steady and was found to change: from then on it is copied at once."""
        self._last: Copied | None = None

    def begin(self, tensors: Sequence[StateTensor], targets: Sequence[Target]) -> None:
        """Copy these; returns before the steady ones are copied. The same list as before stands for the same tensors in
        the same memory."""
        self.join()
        try:
            self._begin(tensors, targets)
        except Exception as error:  # tensors that are not what their pieces say, no thread to copy with
            self._fail(targets, _in_words(error), error)

    def _begin(self, tensors: Sequence[StateTensor], targets: Sequence[Target]) -> None:
        began_at = time.perf_counter()
        planned = self._planned(tensors)
        numbers = sorted(set[int]().union(*(target.entries(planned) for target in targets)))
        wanted = {planned.spans[at].tensor for at in numbers}
        clones = {n: one.tensor.detach().clone() for n, one in self._hasty.items() if n in wanted}
        sources = list[Tensor]()
        for at in numbers:
            span = planned.spans[at]
            sources.append(span.of(clones[span.tensor]) if span.tensor in clones else self._views[at])
        copied = Copied(planned, targets, numbers, sources, Ready(sources), Watch(self._steady), self._ferry)
        self._background.do(lambda: self._run(copied))
        self._last = copied  # only now: for a copy that nobody makes, land would wait for ever
        copied.begun_s = time.perf_counter() - began_at

    def land(self) -> float:
        """From here on the state may change; seconds that this took."""
        if self._last is None or self._last.has_landed.is_set():
            return 0.0
        began_at = time.perf_counter()
        self._last.ready.ask()
        self._last.has_landed.wait()
        return time.perf_counter() - began_at

    @property
    def stall_s(self) -> float:
        """For how long training stood still for the last copy that landed, all in all."""
        return self._last.begun_s + self._last.stall_s if self._last is not None else 0.0

    def join(self) -> None:
        """Until nothing is under way in this process any more."""
        self.land()
        if self._last is not None:
            self._last.is_done.wait()

    def make_ready(self, tensors: Sequence[StateTensor], target: Target) -> None:
        """Nothing is to be copied yet: what a first copy into a target would wait for is done meanwhile."""
        planned = self._planned(tensors)
        ready = Ready(self._views)
        if ready.events:
            self._pinner.do(lambda: self._pin_upcoming(target, planned, ready))
        else:
            threading.Thread(target=_touch, args=(target, planned), name="touch", daemon=True).start()

    def num_saved_bytes(self, tensors: Sequence[StateTensor]) -> int:
        """What this rank writes of them to a checkpoint."""
        return self._planned(tensors).num_saved_bytes

    def _planned(self, tensors: Sequence[StateTensor]) -> Plan:
        """What stays the same from step to step is found once: a step of many tensors must not wait for it."""
        if tensors is self._tensors:
            return self._plan
        now = signature(tensors)
        if now != self._signature:
            self._plan, self._signature = plan(tensors), now
        whole = [one.tensor.detach() for one in tensors]
        is_hasty = [not one.is_steady or one.key in self._restless or not one.tensor.is_contiguous() for one in tensors]
        spans = self._plan.spans
        self._views = [whole[s.tensor] if is_hasty[s.tensor] else s.of(whole[s.tensor]) for s in spans]
        self._steady = [one for one, hasty in zip(tensors, is_hasty, strict=True) if not hasty]
        self._hasty = {n: one for n, (one, hasty) in enumerate(zip(tensors, is_hasty, strict=True)) if hasty}
        self._tensors = tensors
        return self._plan

    def close(self, timeout_s: float = 2.0) -> bool:
        """Whoever fails does not wait long; what it leaves is torn, and says so. Whether nothing is under way."""
        self._is_closing.set()
        is_idle = self._last is None or self._last.is_done.wait(timeout_s)
        self._background.close(timeout_s if is_idle else 0.0)
        is_idle = self._pinner.close(timeout_s) and is_idle
        self._crew.shutdown(wait=False)
        while is_idle and self._pins:
            self._pins.popitem()[1].release()
        return is_idle

    # What follows runs on the background's thread, and pinning on one of its own.

    def _run(self, copied: Copied) -> None:
        began_s = time.thread_time()
        try:
            with copied.ready.entered():
                copied.ready.reach()
                self._copy(copied)
        except BaseException as error:  # training goes on; who wanted the copy decides what that means
            self._fail(copied.untold, _in_words(error), error)
        finally:
            copied.sources.clear()
            copied.busy_s += time.thread_time() - began_s
            copied.has_landed.set()
            copied.is_done.set()
        if copied.ready.events and not self._is_closing.is_set():
            for target in copied.targets:
                self._pinner.do(partial(self._pin_upcoming, target, copied.plan, copied.ready))

    def _copy(self, copied: Copied) -> None:
        places = dict[Target, dict[int, int]]()
        for target in copied.targets:
            try:
                places[target] = dict(zip(target.entries(copied.plan), target.open(copied.plan), strict=True))
            except OSError as error:
                copied.untold.remove(target)
                self._fail([target], f"there is no memory for copies of the state ({error.strerror})")
        if not places:
            return
        if len(places) < len(copied.targets):
            copied.keep_only(set[int]().union(*places.values()))
        first = max(places, key=lambda target: len(places[target]))  # all that is copied at all goes into it
        pinned = self._pinned(first.slots[0], copied.ready)
        began_at = time.perf_counter()
        digests = self._passing(copied, places) if pinned is None else self._straight(copied, places, first, pinned)
        if changed := copied.watch.changed():
            self._restless.update(changed)
            self._tensors = None
            list(digests)  # nobody reads the slots any more when they are written again
            copied.untold.clear()
            self._fail(list(places), f"'{changed[0]}' changed while it was copied, and not by the optimizer")
            return
        copied.stall_s = copied.lateness()
        copied.send_s = time.perf_counter() - began_at if copied.ready.events else 0.0
        copied.sources.clear()
        copied.has_landed.set()
        crcs = dict(zip(copied.numbers, digests, strict=True))
        for target, where in places.items():
            copied.untold.remove(target)
            try:
                target.finish(copied.plan, [crcs[number] for number in where], copied)
            except BaseException as error:  # its own affair: the others have what they wanted
                self._fail([target], _in_words(error), error)

    def _fail(self, targets: Sequence[Target], problem: str, error: BaseException | None = None) -> None:
        for target in targets:
            target.fail(problem, error)

    def _passing(self, copied: Copied, places: dict[Target, dict[int, int]]) -> Iterable[int]:
        """Every entry through this process's hands into every slot; their digests."""
        entries, numbers = copied.plan.entries, copied.numbers
        crcs = [0] * len(numbers)
        blocks = _Blocks()

        def copy(one: Landed) -> None:
            targets = list(_places(places, numbers[one.number], copied.plan))
            copy_one = copy_and_digest if copied.ready.events else blocks.copy
            crcs[one.number] = copy_one(one.data, targets)

        several = self._crew.map if copied.ready.events else map  # a device brings more than one core can digest
        half = len(numbers) // 2
        for batch in self._ferry.land(copied.sources, copied.ready):
            for target, where in places.items():
                ends = [where[n] + entries[n].num_bytes for one in batch if (n := numbers[one.number]) in where]
                for slot in target.slots:
                    slot.touch(max(ends, default=0))
            list(several(copy, batch))
            if batch[0].number <= half <= batch[-1].number:
                _halfway(places)
        return crcs

    def _straight(
        self, copied: Copied, places: dict[Target, dict[int, int]], first: Target, pinned: Pinned
    ) -> Iterable[int]:
        """Every entry into the first slot, by the devices themselves; the digests, which are taken, and the bytes
        copied on into the other slots, by the time one asks for them."""
        numbers = copied.numbers
        for slot in (slot for target in places for slot in target.slots if slot is not first.slots[0]):
            slot.touch_all(self._crew.map)
        ordered = {first: places[first], **places}
        pending: list[Future[int]] = []
        where = [(places[first][number], copied.plan.entries[number].num_bytes) for number in numbers]
        for arrived in self._ferry.land_in(pinned, copied.sources, where):
            for at in arrived:
                source, *onward = _places(ordered, numbers[at], copied.plan)
                pending.append(self._crew.submit(self._digest, copied, source, onward))
            if arrived and arrived[0] <= len(numbers) // 2 <= arrived[-1]:
                _halfway(places)
        return (one.result() for one in pending)

    def _digest(self, copied: Copied, source: Octets, targets: Sequence[Octets]) -> int:
        began_s = time.thread_time()
        crc = copy_and_digest(source, targets)
        copied.busy_s += time.thread_time() - began_s  # a sum that two threads may spoil a little: it is an estimate
        return crc

    def _pinned(self, slot: Slot, ready: Ready) -> Pinned | None:
        """The memory of a slot that is reserved, where a device can copy into it by itself. The first time takes
        long."""
        if not ready.events:
            return None
        with slot.lock:
            known = self._pins.get(slot)
            if known is None or known.memory is not slot.bytes:
                if known is not None:
                    known.release()
                known = self._pins[slot] = Pinned(slot.bytes)
                slot.touch_all(self._crew.map)
                with ready.entered():
                    known.pin(self._is_closing)
        return known if known.is_whole else None

    def _pin_upcoming(self, target: Target, plan: Plan, ready: Ready) -> None:
        """Before they are needed, the next one first. Want of memory is the next copy's to tell."""
        with suppress(OSError):
            for slot in target.upcoming(plan):
                if not self._is_closing.is_set():
                    self._pinned(slot, ready)


def _places(places: dict[Target, dict[int, int]], number: int, plan: Plan) -> Iterator[Octets]:
    """Where an entry goes, in every slot that takes it."""
    for target, where in places.items():
        if number in where:
            begin = DATA_AT + where[number]
            for slot in target.slots:
                yield slot.bytes[begin : begin + plan.entries[number].num_bytes]


def _halfway(targets: Iterable[Target]) -> None:
    for target in targets:
        target.halfway()


def _touch(target: Target, plan: Plan) -> None:
    """Give slots their memory, with what processor time nobody else wants. Want of it is the first copy's to tell."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
    with suppress(OSError):
        for slot in target.upcoming(plan):
            slot.touch_all(map)


def _in_words(error: BaseException) -> str:
    return f"the state cannot be copied: {type(error).__name__}: {error}"


@dataclass
class _Blocks:
    """How much is copied at a time: more and more while the interpreter's lock is hard to get."""

    num_bytes: int = BLOCK_BYTES

    def copy(self, source: Octets, targets: Sequence[Octets]) -> int:
        """CRC32C of the source; the copy follows while the block is still in the cache."""
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

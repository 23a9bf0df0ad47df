"""How is the state of a rank kept in memory that outlives it, while training goes on?

One thread copies it during the next forward and backward, which read the state but do not change it: into a slot of the
rank's own box and, where the image has no replica elsewhere, into a peer's box, on this host by itself, on another by
messages in a group of their own. A copy has **landed** when its bytes are in the own slot: ``land`` comes before the
vote of the very next step, since the update that follows changes the state. It is **sealed** when it is digested,
wherever it has to be: ``join`` comes before the vote of the step after which the next copy is taken.

[Note: one whole state at any time] A slot is touched only when the vote of its own step has come to its end on the
device: then every rank has cast that vote, and sealed the copy before it, in the other slot of its pair. So whenever a
process is killed, all images of the newest copy, or all of the one before it, stand sealed. With a copy after every
step both votes are the same one, and a fault costs one step. With one after every n-th, training goes on while a landed
copy is being sealed, and a fault in that time goes back to the copy before: at most n steps more than at any other. A
slot that could not be sealed is written again, and the sealed one of the pair is left alone.

Invariants: what forward may change is copied before ``begin`` returns; a tensor that was to be steady and changed
before it landed leaves the slot torn, never wrong; lack of memory is told once and ends the keeping, not the run. Costs
two copies of the image in the own box, and two in a peer's where there is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.core.background import Background
from closeranks.core.faults import declare, point
from closeranks.elastic.devices import Ferry, Landed, Ready
from closeranks.elastic.pinning import Pinned
from closeranks.elastic.shipping import receive, send
from closeranks.elastic.slots import About, Octets, Slot, encode_index
from closeranks.elastic.sources import NOTHING, Plan, Watch, copy_and_digest, plan, signature

BEFORE_DATA = declare("slot.before_data", "the slot is invalid, and nothing of the new state is in it yet")
IN_DATA = declare("slot.in_data", "half of the tensors are copied")

_TREE_BYTES = 1 << 14
"""Room for what is no tensor, at least."""


@dataclass(frozen=True, slots=True)
class Berths:
    """Where a rank's copies go. Pairs are paths of two slots; the first is written first."""

    own: tuple[str, str]
    beside: tuple[str, str] | None = None
    """The slots of a peer on this host, which this rank writes itself."""
    away: int | None = None
    """The rank on another host that keeps a copy,"""
    guest_of: int | None = None
    """and the one on another host whose copy is kept here,"""
    guest: tuple[str, str] | None = None
    """in these slots."""
    group: dist.ProcessGroup | None = None
    """For messages between hosts, and nothing else."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of a copy, as far as this rank knows."""

    step: int
    is_sealed: bool
    stall_s: float
    """How long training stood still until it had landed,"""
    late_s: float
    """and until it was sealed, had training waited for that."""
    busy_s: float
    """Processor time of the copying threads."""
    problem: str = ""


@dataclass
class _Task:
    about: About
    tree: bytes
    plan: Plan
    sources: list[Tensor]
    ready: Ready
    watch: Watch
    begun_s: float = 0.0
    """Spent by the thread that trains."""
    stall_s: float = 0.0
    late_s: float = 0.0
    busy_s: float = 0.0
    is_sealed: bool = False
    problem: str = ""
    error: BaseException | None = None
    has_landed: threading.Event = field(default_factory=threading.Event)
    is_done: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """Call sequence, on the thread that trains: ``begin`` after a commit, ``land`` before the next vote, ``join``
    before that of the step whose copy comes next; ``close``."""

    def __init__(self, berths: Berths, num_threads: int = 4) -> None:
        """``num_threads`` digest, and copy to a peer, what comes from a device."""
        self._berths = berths
        self._background = Background("keeper")
        self._crew = ThreadPoolExecutor(num_threads, "keeper")  # starts none before it is needed
        self._ferry = Ferry()
        self._pins: dict[str, Pinned] = {}
        self._is_closing = threading.Event()
        self._turn = self._guest_turn = 0
        """Which slot of a pair comes next."""
        self._slots: dict[str, Slot] = {}
        self._plan, self._signature = NOTHING, signature(())
        self._holdings: Sequence[StateTensor] | None = None
        self._views: list[Tensor] = []
        self._places: dict[int, list[int]] = {}
        """Of each holding, its entries."""
        self._steady: list[StateTensor] = []
        self._hasty: list[tuple[int, StateTensor]] = []
        """What is copied at once."""
        self._restless: set[str] = set()
        """What was said to be steady and was found to change: from then on it is copied at once."""
        self._task: _Task | None = None
        self._has_room = True

    @property
    def num_bytes(self) -> int:
        """Memory of all slots that this rank writes or receives into."""
        return sum(len(slot.bytes) for slot in self._slots.values())

    def begin(self, about: About, holdings: Sequence[StateTensor], tree: bytes) -> None:
        """Copy these; returns before the steady ones are copied. Nothing may be under way. The same list as before
        stands for the same tensors in the same memory."""
        assert self._task is None, "join comes first"
        began_at = time.perf_counter()
        if holdings is not self._holdings:
            self._prepare(holdings)
        sources = list(self._views)
        for number, held in self._hasty:
            tensor = held.tensor.detach().clone()
            for at in self._places[number]:
                sources[at] = self._plan.spans[at].of(tensor)
        task = _Task(about, tree, self._plan, sources, Ready(sources), Watch(self._steady))
        self._background.do(lambda: self._run(task))
        self._task = task  # only now: for a task that nobody runs, join would wait for ever
        task.begun_s = time.perf_counter() - began_at

    def make_ready(self, holdings: Sequence[StateTensor]) -> None:
        """Nothing is to be copied yet: what a first copy would wait for is done meanwhile."""
        self._prepare(holdings)
        ready = Ready(self._views)
        if ready.events:
            self._background.do(lambda: self._pin_all(ready))

    def _prepare(self, holdings: Sequence[StateTensor]) -> None:
        """What stays the same from step to step is found once: a step of many tensors must not wait for it."""
        now = signature(holdings)
        if now != self._signature:
            self._plan, self._signature = plan(holdings), now
        # Detached: a parameter that is given other memory meanwhile does not take its source along.
        tensors = [held.tensor.detach() for held in holdings]
        self._views = [span.of(tensors[span.holding]) for span in self._plan.spans]
        self._places = {number: list[int]() for number in range(len(holdings))}
        for at, span in enumerate(self._plan.spans):
            self._places[span.holding].append(at)
        is_hasty = [
            not held.is_steady or held.key in self._restless or not held.tensor.is_contiguous() for held in holdings
        ]
        self._steady = [held for held, hasty in zip(holdings, is_hasty, strict=True) if not hasty]
        self._hasty = [(n, held) for n, (held, hasty) in enumerate(zip(holdings, is_hasty, strict=True)) if hasty]
        self._holdings = holdings

    @property
    def is_done(self) -> bool:
        """Whether ``join`` has something to tell and would not wait."""
        return self._task is not None and self._task.is_done.is_set()

    def land(self) -> None:
        """From here on the state may change."""
        if self._task is not None:
            self._task.ready.ask()
            self._task.has_landed.wait()

    def join(self) -> Joined | None:
        """From here on the next copy may begin on any rank: all that this rank has a part in are sealed, or torn for
        good. Raises what broke between hosts. None where nothing was under way."""
        self.land()
        task, self._task = self._task, None
        if task is None:
            return None
        task.is_done.wait()
        if task.error is not None:
            raise task.error
        lost = (task.begun_s + task.stall_s, task.begun_s + task.late_s)
        return Joined(task.about.step, task.is_sealed, *lost, task.busy_s, task.problem)

    def close(self, timeout_s: float = 2.0) -> None:
        """Whoever fails does not wait long for a peer that will never answer; what it leaves is torn, and says so."""
        self._is_closing.set()
        is_idle = self._task is None or self._task.is_done.wait(timeout_s)
        self._background.close(timeout_s if is_idle else 0.0)
        self._crew.shutdown(wait=False)
        if is_idle:
            while self._pins:
                self._pins.popitem()[1].release()
            for slot in self._slots.values():
                slot.close()

    # What follows runs on the background's thread.

    def _run(self, task: _Task) -> None:
        began_s = time.thread_time()
        try:
            self._keep(task)
            task.late_s = self._ferry.lateness(task.ready)
        except BaseException as error:  # raised by the next join
            task.error = error
        finally:
            task.sources.clear()
            task.busy_s += time.thread_time() - began_s
            task.has_landed.set()
            task.is_done.set()
        if task.ready.events and self._has_room:
            self._pin_all(task.ready)

    def _keep(self, task: _Task) -> None:
        task.ready.reach()  # see [Note: one whole state at any time]
        berths, sealed = self._berths, None
        if self._has_room:
            try:
                pairs = [pair for pair in (berths.own, berths.beside) if pair is not None]
                sealed = self._fill(task, [self._slot(pair[self._turn]) for pair in pairs])
            except OSError as error:
                self._has_room = False
                task.problem = f"there is no memory for copies of the state ({error.strerror})"
        if sealed is not None:
            self._turn = 1 - self._turn
        if berths.group is not None:
            self._exchange(task, sealed)

    def _fill(self, task: _Task, targets: Sequence[Slot]) -> Slot | None:
        """Copy into the slots and seal them; the first one, or None where a tensor changed meanwhile."""
        num_bytes = task.plan.num_bytes
        for slot in targets:
            self._reserve(slot, task.plan, len(task.tree))
        for slot in targets:
            slot.invalidate()
        pinned = self._pinned(self._berths.own[self._turn], task.ready)
        point(BEFORE_DATA)
        with task.ready.entered():
            digests = self._passing(task, targets) if pinned is None else self._straight(task, targets, pinned)
        if changed := task.watch.changed():
            self._restless.update(changed)
            self._holdings = None
            task.problem = f"'{changed[0]}' changed while it was copied, and not by the optimizer"
            list(digests)  # nobody reads the slot any more when it is written again
            return None
        self._tell_landed(task)
        index = encode_index(task.plan.encoded, task.tree, list(digests))
        for slot in targets:
            slot.seal(task.about, num_bytes, index)
        task.is_sealed = True
        return targets[0]

    def _tell_landed(self, task: _Task) -> None:
        task.stall_s = self._ferry.lateness(task.ready)
        task.sources.clear()
        task.has_landed.set()

    def _straight(self, task: _Task, targets: Sequence[Slot], pinned: Pinned) -> Iterable[int]:
        """Every entry into the first slot, by the devices themselves; the digests, which are taken, and the bytes
        copied on into the other slot, by the time one asks for them."""
        entries, datas = task.plan.entries, [slot.data(task.plan.num_bytes) for slot in targets]
        for slot in targets[1:]:
            slot.touch_all(self._crew.map)
        pending: list[Future[int]] = []
        for numbers in self._ferry.land_in(pinned, task.sources, entries):
            for number in numbers:
                place = slice(entries[number].offset, entries[number].offset + entries[number].num_bytes)
                source, *others = (data[place] for data in datas)
                pending.append(self._crew.submit(self._digest, task, source, others))
            if numbers and numbers[0] <= len(entries) // 2 <= numbers[-1]:
                point(IN_DATA)
        return (one.result() for one in pending)

    def _digest(self, task: _Task, source: Octets, targets: Sequence[Octets]) -> int:
        began_s = time.thread_time()
        crc = copy_and_digest(source, targets)
        task.busy_s += time.thread_time() - began_s  # a sum that two threads may spoil a little: it is an estimate
        return crc

    def _passing(self, task: _Task, targets: Sequence[Slot]) -> Iterable[int]:
        """Every entry through this process's hands into every slot; their digests."""
        entries, num_bytes = task.plan.entries, task.plan.num_bytes
        datas = [slot.data(num_bytes) for slot in targets]
        crcs = [0] * len(entries)

        def copy(one: Landed) -> None:
            entry = entries[one.number]
            place = slice(entry.offset, entry.offset + entry.num_bytes)
            crcs[one.number] = copy_and_digest(one.data, [data[place] for data in datas])

        several = self._crew.map if task.ready.events else map  # a device brings more than one core can digest
        for batch in self._ferry.land(task.sources, task.ready):
            last = entries[batch[-1].number]
            for slot in targets:
                slot.touch(last.offset + last.num_bytes)
            list(several(copy, batch))
            if batch[0].number <= len(entries) // 2 <= batch[-1].number:
                point(IN_DATA)
        return crcs

    def _pinned(self, path: str, ready: Ready) -> Pinned | None:
        """The memory of a slot that is reserved, where a device can copy into it by itself. The first time takes
        long."""
        if not ready.events:
            return None
        slot, known = self._slot(path), self._pins.get(path)
        if known is None or known.memory is not slot.bytes:
            if known is not None:
                known.release()
            known = self._pins[path] = Pinned(slot.bytes)
            slot.touch_all(self._crew.map)
            with ready.entered():
                known.pin(self._is_closing)
        return known if known.is_whole else None

    def _pin_all(self, ready: Ready) -> None:
        """Before they are needed, the next one first. Want of memory is the next copy's to tell."""
        own = self._berths.own
        with suppress(OSError):
            for path in (own[self._turn], own[1 - self._turn]):
                if not self._is_closing.is_set():
                    self._reserve(self._slot(path), self._plan, 0)
                    self._pinned(path, ready)

    def _reserve(self, slot: Slot, plan: Plan, num_tree: int) -> None:
        """``OSError`` where there is no memory; a slot that was never written says so then."""
        try:
            slot.reserve(plan.num_bytes, len(plan.encoded) + max(num_tree, _TREE_BYTES) + 4 * len(plan.entries) + 64)
        except OSError:
            slot.give_up()
            raise

    def _exchange(self, task: _Task, sealed: Slot | None) -> None:
        """With other hosts, whatever happened here: nobody may be left waiting."""
        berths = self._berths
        slot = None if sealed is None else sealed.bytes
        works = [] if berths.away is None else send(slot, berths.away, berths.group)
        if berths.guest_of is not None:
            guest = None if berths.guest is None else self._slot(berths.guest[self._guest_turn])
            received = receive(guest, berths.guest_of, berths.group)
            self._guest_turn = 1 - self._guest_turn if received.is_sealed else self._guest_turn
            task.problem = task.problem or received.problem
        for work in works:
            work.wait()

    def _slot(self, path: str) -> Slot:
        if path not in self._slots:
            self._slots[path] = Slot(path)
        return self._slots[path]

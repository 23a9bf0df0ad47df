"""Keeps a rank's state in memory that outlives it: in two slots of its own that take turns, and in those of a peer.

A copy goes into a slot of the rank's own box and, where the image has no replica elsewhere, into a peer's box: on this
host by the same pass, on another by messages in a group of their own, from a thread of their own. It is **sealed** when
it is digested, wherever it has to be: ``join`` comes before the vote of the step after which the next copy is taken.

[Note: one whole state at any time] A slot is touched only when the vote of its own step has come to its end on the
device: then every rank has cast that vote, and sealed the copy before it, in the other slot of its pair. So whenever a
process is killed, all images of the newest copy, or all of the one before it, stand sealed. With a copy after every
step both votes are the same one, and a fault costs one step. With one after every n-th, training goes on while a landed
copy is being sealed, and a fault in that time goes back to the copy before: at most n steps more than at any other. A
slot that could not be sealed is written again, and the sealed one of the pair is left alone.

Invariant: lack of memory is told once and ends the keeping, not the run. Costs two copies of the image in the own box,
and two in a peer's where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from closeranks.capture.capture import Capture, Copied
from closeranks.capture.plan import NOTHING, Plan
from closeranks.capture.slots import About, Slot, encode_entries, encode_index
from closeranks.capture.tensors import StateTensor
from closeranks.core.background import Background
from closeranks.core.faults import declare, point
from closeranks.elastic.shipping import receive, send

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
    send_s: float = 0.0
    """How long devices took to send what lies on them."""
    problem: str = ""


class Keeper:
    """Call sequence, on the thread that trains: ``snapshot`` makes the target of a copy that is begun at once; ``join``
    before the vote of the step whose copy comes next; ``close``, after the capture."""

    def __init__(self, berths: Berths) -> None:
        self._berths = berths
        self._background = Background("exchange")
        self._turn = self._guest_turn = 0
        """Which slot of a pair comes next."""
        self._slots: dict[str, Slot] = {}
        self._encoded: tuple[Plan, bytes] = (NOTHING, b"[]")
        self._newest: Snapshot | None = None
        self.has_room = True
        """False from when memory was lacking: nothing is copied any more, and other hosts are told so."""

    @property
    def num_bytes(self) -> int:
        """Memory of all slots that this rank writes or receives into."""
        return sum(len(slot.bytes) for slot in self._slots.values())

    def snapshot(self, about: About, tree: bytes) -> list[Snapshot]:
        """A target for the whole state; none where there is no room for it. Nothing may be under way."""
        assert self._newest is None, "join comes first"
        pairs = [pair for pair in (self._berths.own, self._berths.beside) if pair is not None]
        self._newest = Snapshot(self, about, tree, [self._slot(pair[self._turn]) for pair in pairs])
        if self.has_room:
            return [self._newest]
        self.settle(self._newest)
        return []

    def make_ready(self, capture: Capture, tensors: Sequence[StateTensor]) -> None:
        """Nothing is to be copied yet: slots are made ready for a device meanwhile."""
        if any(one.tensor.is_cuda for one in tensors):
            capture.make_ready(tensors, Snapshot(self, About(0, 0, "", 0), b"", []))

    @property
    def is_done(self) -> bool:
        """Whether ``join`` has something to tell and would not wait."""
        return self._newest is not None and self._newest.is_done.is_set()

    def join(self) -> Joined | None:
        """From here on the next copy may begin on any rank: all that this rank has a part in are sealed, or torn for
        good. Raises what broke. None where nothing was under way."""
        newest, self._newest = self._newest, None
        if newest is None:
            return None
        newest.is_done.wait()
        if newest.error is not None:
            raise newest.error
        copied, step = newest.copied, newest.about.step
        if copied is None:
            return Joined(step, newest.is_sealed, 0.0, 0.0, 0.0, problem=newest.problem)
        stall_s, late_s = copied.begun_s + copied.stall_s, copied.begun_s + newest.late_s
        return Joined(step, newest.is_sealed, stall_s, late_s, copied.busy_s, copied.send_s, newest.problem)

    def close(self, timeout_s: float = 2.0) -> None:
        """Whoever fails does not wait long for a peer that will never answer; what it leaves is torn, and says so."""
        is_idle = self._newest is None or self._newest.is_done.wait(timeout_s)
        self._background.close(timeout_s if is_idle else 0.0)
        for slot in self._slots.values() if is_idle else ():
            slot.close()

    def reserve(self, slot: Slot, plan: Plan, num_tree: int) -> None:
        """``OSError`` where there is no memory; a slot that was never written says so then."""
        try:
            num_index = len(self.encoded(plan)) + max(num_tree, _TREE_BYTES) + 4 * len(plan.entries) + 64
            slot.reserve(plan.num_bytes, num_index)
        except OSError:
            slot.give_up()
            raise

    def encoded(self, plan: Plan) -> bytes:
        """The entries as they stand in every slot."""
        if self._encoded[0] is not plan:
            self._encoded = (plan, encode_entries(plan.entries))
        return self._encoded[1]

    def own_slots(self) -> tuple[Slot, Slot]:
        """The next one first."""
        own = self._berths.own
        return self._slot(own[self._turn]), self._slot(own[1 - self._turn])

    def settle(self, snapshot: Snapshot) -> None:
        """The thread that copied: what came of it here is known."""
        if snapshot.is_sealed:
            self._turn = 1 - self._turn
        if self._berths.group is None:
            snapshot.be_done()
        else:
            self._background.do(lambda: self._exchange(snapshot))

    def _exchange(self, snapshot: Snapshot) -> None:
        """With other hosts, whatever happened here: nobody may be left waiting."""
        berths = self._berths
        try:
            sealed = snapshot.slots[0].bytes if snapshot.is_sealed else None
            works = [] if berths.away is None else send(sealed, berths.away, berths.group)
            if berths.guest_of is not None:
                guest = None if berths.guest is None else self._slot(berths.guest[self._guest_turn])
                received = receive(guest, berths.guest_of, berths.group)
                self._guest_turn = 1 - self._guest_turn if received.is_sealed else self._guest_turn
                snapshot.problem = snapshot.problem or received.problem
            for work in works:
                work.wait()
        except BaseException as error:  # raised by the next join
            snapshot.error = error
        finally:
            snapshot.be_done()

    def _slot(self, path: str) -> Slot:
        if path not in self._slots:
            self._slots[path] = Slot(path)
        return self._slots[path]


class Snapshot:
    """One copy of the whole state, as a target of a capture."""

    def __init__(self, keeper: Keeper, about: About, tree: bytes, slots: Sequence[Slot]) -> None:
        self._keeper, self.about, self._tree, self.slots = keeper, about, tree, slots
        self.copied: Copied | None = None
        self.is_sealed = False
        self.problem = ""
        self.late_s = 0.0
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def entries(self, plan: Plan) -> Sequence[int]:
        return range(len(plan.entries))

    def open(self, plan: Plan) -> Sequence[int]:
        """All slots have their memory before the first of them is invalid."""
        try:
            for slot in self.slots:
                self._keeper.reserve(slot, plan, len(self._tree))
        except OSError:
            self._keeper.has_room = False
            raise
        for slot in self.slots:
            slot.invalidate()
        point(BEFORE_DATA)
        return [entry.offset for entry in plan.entries]

    def halfway(self) -> None:
        point(IN_DATA)

    def finish(self, plan: Plan, crcs: Sequence[int], copied: Copied) -> None:
        self.copied = copied
        index = encode_index(self._keeper.encoded(plan), self._tree, crcs)
        for slot in self.slots:
            slot.seal(self.about, plan.num_bytes, index)
        self.is_sealed = True
        self._keeper.settle(self)

    def fail(self, problem: str, error: BaseException | None) -> None:
        self.problem, self.error = problem, error
        self._keeper.settle(self)

    def upcoming(self, plan: Plan) -> Sequence[Slot]:
        slots = self._keeper.own_slots()
        for slot in slots:
            self._keeper.reserve(slot, plan, 0)
        return slots

    def be_done(self) -> None:
        self.late_s = self.copied.lateness() if self.copied is not None else 0.0
        self.is_done.set()

"""Writes snapshots of a rank's state to memory that outlives the process: its own two slots in turn, and a peer's.

A snapshot goes into a slot of the rank's own snapshot memory and, if the image has no replica elsewhere, into that of a
peer: on the same host in the same pass, on another host by messages in a process group and a thread of their own. A
snapshot is **sealed** when it is digested in all these places: ``wait`` must be called before the vote of the step
after which the next snapshot is taken.

[Note: one whole state at any time] A slot is overwritten only after the vote of its own step has completed on the
device: by then every rank has cast that vote, and has sealed the previous snapshot in the other slot of its pair. So
whenever a process is killed, either all images of the newest snapshot or all images of the previous one are sealed.
With a snapshot after every step, both votes are the same one and a fault costs one step. With a snapshot every n steps,
training continues while a copied snapshot is being sealed, and a fault in that time falls back to the previous one: at
most n steps more than at any other time. If a slot could not be sealed, the next snapshot is written to the same slot,
and the sealed slot of the pair is left alone.

Invariant: lack of memory is reported once and ends the snapshots, not the run. Costs two copies of the image in the
rank's own snapshot memory, and two in a peer's if there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from closeranks.capture.capture import Capture, StateCopy
from closeranks.capture.capture_plan import EMPTY_PLAN, CapturePlan
from closeranks.capture.slots import SlotHeader, SnapshotSlot, encode_entries, encode_index
from closeranks.capture.tensors import StateTensor
from closeranks.core.system.background_thread import BackgroundThread
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.elastic.slot_transfer import receive_slot, send_slot

BEFORE_DATA = declare_failpoint("slot.before_data", "the slot is invalid, and nothing of the new state is in it yet")
IN_DATA = declare_failpoint("slot.in_data", "half of the tensors are copied")

_TREE_BYTES = 1 << 14
"""Minimum room for the non-tensor part of the state."""


@dataclass(frozen=True, slots=True)
class SnapshotDestinations:
    """Where a rank's snapshots go. Pairs are the paths of two slots; the first is written first."""

    own: tuple[str, str]
    same_host_slots: tuple[str, str] | None = None
    """The slots of a peer on this host, which this rank writes itself."""
    remote_peer: int | None = None
    """The rank on another host that keeps a copy of this rank's image."""
    remote_source: int | None = None
    """The rank on another host whose copy is kept here."""
    remote_source_slots: tuple[str, str] | None = None
    """The slots for that copy."""
    group: dist.ProcessGroup | None = None
    """Used only for slot transfers between hosts."""


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """The result of a snapshot, as far as this rank knows."""

    step: int
    is_sealed: bool
    stall_s: float
    """How long training was blocked until the copy was complete."""
    late_s: float
    """How long training would have been blocked if it had waited until the snapshot was sealed."""
    busy_s: float
    """CPU time of the copying threads."""
    send_s: float = 0.0
    """How long the device-to-host transfers took."""
    problem: str = ""


class SnapshotWriter:
    """Call sequence, on the training thread: ``snapshot`` returns the target of a capture that is started at once;
    ``wait`` before the vote of the step that is snapshotted next; ``close`` after the capture is closed."""

    def __init__(self, destinations: SnapshotDestinations) -> None:
        self._destinations = destinations
        self._background = BackgroundThread("exchange")
        self._slot_index = self._remote_slot_index = 0
        """Index of the slot of a pair that is written next."""
        self._slots: dict[str, SnapshotSlot] = {}
        self._encoded: tuple[CapturePlan, bytes] = (EMPTY_PLAN, b"[]")
        self._newest: Snapshot | None = None
        self.has_room = True
        """False once memory was short: no snapshots are taken from then on, and other hosts are told."""

    @property
    def num_bytes(self) -> int:
        """Memory of all slots that this rank writes or receives into."""
        return sum(len(slot.bytes) for slot in self._slots.values())

    def snapshot(self, header: SlotHeader, tree: bytes) -> list[Snapshot]:
        """A capture target for the whole state; an empty list if there is no memory for it. No snapshot may be in
        progress."""
        assert self._newest is None, "wait comes first"
        pairs = [pair for pair in (self._destinations.own, self._destinations.same_host_slots) if pair is not None]
        self._newest = Snapshot(self, header, tree, [self._slot(pair[self._slot_index]) for pair in pairs])
        if self.has_room:
            return [self._newest]
        self.on_copied(self._newest)
        return []

    def make_ready(self, capture: Capture, tensors: Sequence[StateTensor]) -> None:
        """Allocate and pin the slots in the background before the first snapshot, if the state is on a device."""
        if any(one.tensor.is_cuda for one in tensors):
            capture.make_ready(tensors, Snapshot(self, SlotHeader(0, 0, "", 0), b"", []))

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` has a result to return and would not block."""
        return self._newest is not None and self._newest.is_done.is_set()

    def wait(self) -> SnapshotResult | None:
        """Wait until every copy that this rank writes or receives is sealed or has failed for good: from then on the
        next snapshot may start on any rank. Raises the error of a broken one; None if none was in progress."""
        newest, self._newest = self._newest, None
        if newest is None:
            return None
        newest.is_done.wait()
        if newest.error is not None:
            raise newest.error
        copied, step = newest.copied, newest.about.step
        if copied is None:
            return SnapshotResult(step, newest.is_sealed, 0.0, 0.0, 0.0, problem=newest.problem)
        stall_s, late_s = copied.begun_s + copied.stall_s, copied.begun_s + newest.late_s
        return SnapshotResult(step, newest.is_sealed, stall_s, late_s, copied.busy_s, copied.send_s, newest.problem)

    def close(self, timeout_s: float = 2.0) -> None:
        """A failing rank does not wait long for a peer that will never answer; a slot abandoned here is marked as
        torn."""
        is_idle = self._newest is None or self._newest.is_done.wait(timeout_s)
        self._background.close(timeout_s if is_idle else 0.0)
        for slot in self._slots.values() if is_idle else ():
            slot.close()

    def reserve(self, slot: SnapshotSlot, plan: CapturePlan, num_tree: int) -> None:
        """``OSError`` if there is no memory; a slot that was never written is then marked as void."""
        try:
            num_index = len(self.encoded(plan)) + max(num_tree, _TREE_BYTES) + 4 * len(plan.entries) + 64
            slot.reserve(plan.num_bytes, num_index)
        except OSError:
            slot.mark_void()
            raise

    def encoded(self, plan: CapturePlan) -> bytes:
        """The plan's entries as encoded in every slot's index."""
        if self._encoded[0] is not plan:
            self._encoded = (plan, encode_entries(plan.entries))
        return self._encoded[1]

    def own_slots(self) -> tuple[SnapshotSlot, SnapshotSlot]:
        """The next one first."""
        own = self._destinations.own
        return self._slot(own[self._slot_index]), self._slot(own[1 - self._slot_index])

    def on_copied(self, snapshot: Snapshot) -> None:
        """Called by the copying thread when the copy on this host is sealed or has failed."""
        if snapshot.is_sealed:
            self._slot_index = 1 - self._slot_index
        if self._destinations.group is None:
            snapshot.mark_done()
        else:
            self._background.submit(lambda: self._exchange(snapshot))

    def _exchange(self, snapshot: Snapshot) -> None:
        """Exchange copies with other hosts, even if the local copy failed: no peer may be left waiting."""
        destinations = self._destinations
        try:
            sealed = snapshot.slots[0].bytes if snapshot.is_sealed else None
            works = (
                []
                if destinations.remote_peer is None
                else send_slot(sealed, destinations.remote_peer, destinations.group)
            )
            if destinations.remote_source is not None:
                remote_slot = (
                    None
                    if destinations.remote_source_slots is None
                    else self._slot(destinations.remote_source_slots[self._remote_slot_index])
                )
                received = receive_slot(remote_slot, destinations.remote_source, destinations.group)
                self._remote_slot_index = 1 - self._remote_slot_index if received.is_sealed else self._remote_slot_index
                snapshot.problem = snapshot.problem or received.problem
            for work in works:
                work.wait()
        except BaseException as error:  # raised by ``wait``
            snapshot.error = error
        finally:
            snapshot.mark_done()

    def _slot(self, path: str) -> SnapshotSlot:
        if path not in self._slots:
            self._slots[path] = SnapshotSlot(path)
        return self._slots[path]


class Snapshot:
    """One snapshot of the whole state, as a target of a capture."""

    def __init__(self, writer: SnapshotWriter, header: SlotHeader, tree: bytes, slots: Sequence[SnapshotSlot]) -> None:
        self._writer, self.about, self._tree, self.slots = writer, header, tree, slots
        self.copied: StateCopy | None = None
        self.is_sealed = False
        self.problem = ""
        self.late_s = 0.0
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def entries(self, plan: CapturePlan) -> Sequence[int]:
        return range(len(plan.entries))

    def open(self, plan: CapturePlan) -> Sequence[int]:
        """Memory for all slots is reserved before the first of them is invalidated."""
        try:
            for slot in self.slots:
                self._writer.reserve(slot, plan, len(self._tree))
        except OSError:
            self._writer.has_room = False
            raise
        for slot in self.slots:
            slot.invalidate()
        failpoint(BEFORE_DATA)
        return [entry.offset for entry in plan.entries]

    def on_half_copied(self) -> None:
        failpoint(IN_DATA)

    def finish(self, plan: CapturePlan, crcs: Sequence[int], copied: StateCopy) -> None:
        self.copied = copied
        index = encode_index(self._writer.encoded(plan), self._tree, crcs)
        for slot in self.slots:
            slot.seal(self.about, plan.num_bytes, index)
        self.is_sealed = True
        self._writer.on_copied(self)

    def fail(self, problem: str, error: BaseException | None) -> None:
        self.problem, self.error = problem, error
        self._writer.on_copied(self)

    def next_slots(self, plan: CapturePlan) -> Sequence[SnapshotSlot]:
        slots = self._writer.own_slots()
        for slot in slots:
            self._writer.reserve(slot, plan, 0)
        return slots

    def mark_done(self) -> None:
        self.late_s = self.copied.stall_so_far_s() if self.copied is not None else 0.0
        self.is_done.set()

"""Restores the state that a generation starts from.

The first generation starts as the job says. A later one restores from the snapshot memory of its own host, from a
peer's copy on another host, from the run's newest sound checkpoint, or from the run's initial state. All ranks exchange
what they can read, make the same choice and read; a copy that proves damaged is skipped by all of them together, with a
warning.

Invariant: when ``restore_generation`` returns, all ranks hold the state of the same step, every byte of it checked, or
all of them raised. No sound copy is changed meanwhile, so that after a crash the restore can be repeated.

[Note: a spoilt beginning] A state that proves damaged while it is read has overwritten a part of the model. Another
state that is read after it overwrites all of that; the run's initial state would not. If no other state is left, the
damaged copies are marked as such and this generation ends: the next one starts with a fresh model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from closeranks.capture.capture_plan import num_digest_threads
from closeranks.capture.slots import SealedSlot, SlotError, SlotHeader, SnapshotSlot, inspect_slot, void_slot
from closeranks.core.errors import CloseranksError, SetupError
from closeranks.core.events import Event, Restored, Resumed, StepDone, Warned, decode
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.regular_file import read_text
from closeranks.elastic.backup_ranks import backup_ranks, images_of, layout_digest
from closeranks.elastic.restore_plan import (
    OWN_FILES,
    PEER_FILES,
    RankPlacement,
    RestorePlan,
    SnapshotCopy,
    SnapshotLocation,
    StateKey,
    is_in_place,
    plan_restore,
    rank_placements,
)
from closeranks.elastic.slot_transfer import receive_slot, send_slot
from closeranks.elastic.snapshot_paths import SnapshotPaths
from closeranks.elastic.snapshot_reader import DamagedSnapshot, SnapshotReader
from closeranks.elastic.vote import Ballot
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component, Unique
from closeranks.run.state.resume import load_initial_state, resume_own_checkpoint
from closeranks.run.state.session_checkpoints import StartPoint, checkpoint_place, next_attempt
from closeranks.run.state.state import RunState as RunState
from closeranks.run.step.engine import Engine
from closeranks.telemetry.run_log.recorder import last_step, parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder

OPENED = declare_failpoint("restore.opened", "the group of a later generation has formed; nobody knows what is held")
AGREED = declare_failpoint("restore.agreed", "all ranks know from which copies they go on, and have read none")
FETCHING = declare_failpoint("restore.fetching", "a copy from another host has arrived, others may be on their way")
BEFORE_VERIFY = declare_failpoint("restore.before_verify", "everything is at hand, and nothing of it is checked")
AFTER_VERIFY = declare_failpoint(
    "restore.after_verify", "this rank has its state back, and does not know of the others"
)
FIRST_STEP = declare_failpoint(
    "restore.first_step", "the first step of a later generation is computed, and not voted on"
)
_BEGINNING = "beginning.json"
"""In the run folder: what a later generation must know of the first and cannot find out."""
_NONE_OF_OURS = 1 << 30
_USUAL = ("empty", "torn")
"""What a kill leaves in one slot of a pair; the other one is complete."""


@dataclass(frozen=True, slots=True)
class RestoredGeneration:
    """Where a generation starts, and what it found in memory."""

    start_point: StartPoint
    snapshot_paths: SnapshotPaths
    folder: Path
    event: Restored | None = None
    found_copies: tuple[SnapshotCopy, ...] = ()
    """All copies found in the snapshot memory of all hosts."""
    state: StateKey | None = None
    """The one that the generation starts from; its copies must be kept until the first new snapshot is sealed."""
    is_in_place: bool = False
    """Whether every rank and every peer has that state in the slot where it would be written."""

    def start_events(self, warnings: Sequence[str], *, is_rank_zero: bool) -> Iterator[Event]:
        """The events at the start of a generation: a later one does not repeat those of the first."""
        if self.event is not None:
            if is_rank_zero:
                yield self.event
                yield from _unreported_steps(self.folder, self.start_point)
            return
        if self.start_point.path:
            yield Resumed(self.start_point.step, self.start_point.path)
        for text in (*self.start_point.notes, *warnings) if is_rank_zero else ():
            yield Warned(text)


def restore_generation(
    engine: Engine, state: RunState, folder: Path, snapshot_paths: SnapshotPaths
) -> RestoredGeneration:
    """Collective."""
    context = engine.context
    if not snapshot_paths:
        return RestoredGeneration(load_initial_state(context, state, folder), snapshot_paths, folder)
    if context.world.generation == 0:
        started = RestoredGeneration(load_initial_state(context, state, folder), snapshot_paths, folder)
        _note_beginning(context, folder)  # only now: a refused job leaves the folder unchanged
        return started
    began_at = time.monotonic()
    failpoint(OPENED)
    engine.components.add(_FirstStep())
    memory = _Memory(context, state, snapshot_paths)
    plan, tree = memory.restore()
    if plan is not None:
        step, sources = plan.step, {plan.source_of(rank, one.host) for rank, one in enumerate(memory.placements)}
        found = StartPoint(step, "", tree)
        source = "peer" if "peer" in sources else "memory"
    else:
        found, source = _from_disk(context, state, folder, memory)
    event = Restored(found.step, source, context.world.generation, time.monotonic() - began_at, memory.notes)
    if plan is None:
        return RestoredGeneration(found, snapshot_paths, folder, event, memory.copies)
    if not (folder / _BEGINNING).exists():  # the run folder was removed: all that is saved from now on is this run's
        _note_beginning(context, folder)
    backups = choose_backup_ranks(context, state, [placement.image for placement in memory.placements])
    is_there = is_in_place(plan, memory.sound(), memory.placements, backups)
    return RestoredGeneration(found, snapshot_paths, folder, event, memory.copies, plan.state, is_there)


class _FirstStep(Component):
    """A failpoint in the first step of a later generation."""

    def __init__(self) -> None:
        self._label = FIRST_STEP

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if self._label:
            failpoint(self._label)
            self._label = ""


def _unreported_steps(folder: Path, start_point: StartPoint) -> Iterator[Event]:
    """The last step, or those of the last synchronisation interval, if other ranks have its state but rank 0 was lost
    before it recorded the results."""
    lines = [parse_line(line.encode()) for line in start_point.tree.get("last", "").splitlines()]
    known = last_step(RunFolder(folder).metrics(0)) if lines else 0
    for event in (decode(line) for line in lines if line):
        if isinstance(event, StepDone) and event.step > known:
            yield event


def rank_images(context: RunContext, state: RunState) -> tuple[str, ...]:
    """The image of every rank."""
    return images_of(context.groups.mesh, are_own=state.unique is Unique.RANK)


def choose_backup_ranks(context: RunContext, state: RunState, images: Sequence[str]) -> tuple[int | None, ...]:
    """The rank that keeps a second copy of each rank's image; see ``elastic.second_copies``."""
    mode, hosts = context.job.elastic.second_copies, context.hosts
    skips_by_default = len(set(hosts)) > 1 and state.unique is not Unique.NOTHING
    if mode == "off" or (mode == "auto" and skips_by_default):
        return (None,) * len(hosts)
    return backup_ranks(hosts, images)


def _from_disk(context: RunContext, state: RunState, folder: Path, memory: _Memory) -> tuple[StartPoint, str]:
    skipped: list[str] = []
    found = resume_own_checkpoint(context, state, folder, _first_attempt(context, folder), skipped)
    if found is None and (memory.is_spoilt or skipped):
        _begin_anew(context, folder, memory, skipped)
    if found is not None or memory.had_later_snapshots:
        memory.notes.append("no complete state is in memory")
    memory.notes.extend(skipped)
    return (found, "checkpoint") if found is not None else (load_initial_state(context, state, folder), "start")


def _begin_anew(context: RunContext, folder: Path, memory: _Memory, skipped: Sequence[str]) -> NoReturn:
    """Collective. See [Note: a spoilt beginning]; this run's checkpoints, none of which is sound, no longer count."""
    memory.void()
    _note_beginning(context, folder)
    context.groups.world.all_gather_text("")  # the first to raise gets the others killed
    what = "; ".join([*memory.notes, *skipped])
    raise CloseranksError(f"no state of this run is valid any more ({what})", "New workers start from the beginning.")


@dataclass
class _Memory:
    """The contents of the snapshot memory of all hosts, the same on all ranks."""

    context: RunContext
    run_state: RunState
    snapshot_paths: SnapshotPaths
    placements: tuple[RankPlacement, ...] = ()
    copies: tuple[SnapshotCopy, ...] = ()
    notes: list[str] = field(default_factory=list)
    bad: set[SnapshotLocation] = field(default_factory=set)
    is_spoilt: bool = False
    """Whether any rank's model may hold parts of a state that proved damaged."""
    had_later_snapshots: bool = False
    """Whether there ever was more than the first snapshot, which is sealed before the vote of the first step."""

    def __post_init__(self) -> None:
        self.placements = rank_placements(self.context.hosts, rank_images(self.context, self.run_state))
        host = self.placements[self.context.world.rank].host
        is_first = self.placements[self.context.world.rank].local_index == 0  # all ranks of a host see the same
        own = _local_copies(self.snapshot_paths, host) if is_first else [[], [], False]
        gathered = [json.loads(text) for text in self.context.groups.world.all_gather_text(json.dumps(own))]
        self.copies = tuple(
            SnapshotCopy(SnapshotLocation(*location), SlotHeader(**header))
            for rows, *_ in gathered
            for location, header in rows
        )
        self.notes += [note for _, notes, _ in gathered for note in notes]
        self.had_later_snapshots = bool(self.notes) or any(is_used for *_, is_used in gathered)

    def void(self) -> None:
        """Invalidate the copies that proved bad, so that no later generation uses them; one rank of each host does."""
        placement = self.placements[self.context.world.rank]
        for location in self.bad if placement.local_index == 0 else ():
            if location.host == placement.host:
                void_slot(self.snapshot_paths.paths[location.local_index][location.file])

    def sound(self) -> list[SnapshotCopy]:
        return [copy for copy in self.copies if copy.location not in self.bad]

    def restore(self) -> tuple[RestorePlan | None, Mapping[str, Any]]:
        """Try to read the newest complete state; drop the copies that prove bad and repeat until one is read."""
        layout = layout_digest(self.context.layout)
        while (plan := plan_restore(self.sound(), self.placements, layout, self.snapshot_paths.run)) is not None:
            failpoint(AGREED)
            with ExitStack() as stack:
                attempt = _Attempt(self.context, self.run_state, self.snapshot_paths, self.placements, plan, stack)
                tree, problems = attempt.read()
                failpoint(AFTER_VERIFY)
                # After this exchange all ranks have finished reading: fetched copies may be freed.
                gathered = [
                    json.loads(text) for text in self.context.groups.world.all_gather_text(json.dumps(problems))
                ]
            blamed = {SnapshotLocation(*location): what for problems in gathered for *location, what in problems}
            if not blamed:
                return plan, tree
            self.bad |= blamed.keys()
            self.is_spoilt = True
            self.notes += list(dict.fromkeys(blamed.values()))
        return None, {}


def _local_copies(snapshot_paths: SnapshotPaths, host: int) -> list[Any]:
    """What the snapshot memory of this host holds, notes about slots that cannot be used, and whether any pair of slots
    was ever written twice: a run killed during its very first snapshot has lost nothing."""
    rows, notes, is_used = [], [], False
    for local_index, paths in enumerate(snapshot_paths.paths):
        for file, path in enumerate(paths):
            inspection = inspect_slot(path)
            is_used = is_used or (file in (OWN_FILES[1], PEER_FILES[1]) and inspection.reason != "empty")
            if inspection.header is not None:
                rows.append([[host, local_index, file], asdict(inspection.header)])
            elif not inspection.reason.startswith(_USUAL):
                notes.append(
                    f"a snapshot in memory of local rank {local_index} of host {host} was skipped: {inspection.reason}"
                )
    return [rows, notes, is_used]


CopyProblem = list[Any]
"""Location of a copy (host, worker's memory on that host, file), and what is wrong with it."""


@dataclass
class _Attempt:
    """One attempt to read one state."""

    context: RunContext
    run_state: RunState
    snapshot_paths: SnapshotPaths
    placements: Sequence[RankPlacement]
    plan: RestorePlan
    stack: ExitStack

    @property
    def rank(self) -> int:
        return self.context.world.rank

    def read(self) -> tuple[Mapping[str, Any], list[CopyProblem]]:
        """Restore the run's state; never raises for a bad copy: other ranks may find it sound."""
        paths, problems = self._fetch()
        if problems:
            return {}, problems
        wanted = self.plan.reads[self.rank]
        failpoint(BEFORE_VERIFY)
        try:
            sealed = [SealedSlot(paths.get(name) or self._path(copy)) for name, copy in wanted.items()]
            num_threads = num_digest_threads(self.context.world.local_size)
            with SnapshotReader(sealed, num_threads) as reader:
                self.run_state.restore(reader)
        except DamagedSnapshot as error:
            blamed = [c for n, c in wanted.items() if (paths.get(n) or self._path(c)) == error.slot.path]
            return {}, [_problem(copy, str(error)) for copy in blamed]
        except (SlotError, OSError) as error:  # no particular copy: the whole state cannot be used
            return {}, [_problem(copy, f"the copy of {copy.about.image}: {error}") for copy in wanted.values()]
        return reader.tree, []

    def _path(self, copy: SnapshotCopy) -> str:
        return self.snapshot_paths.paths[copy.location.local_index][copy.location.file]

    def _fetch(self) -> tuple[dict[str, str], list[CopyProblem]]:
        """Fetch the copies that this host lacks, one after the other in the same order on all ranks. Returns their
        paths by image, and the problems."""
        if not self.plan.fetches:
            return {}, []
        fetched: dict[str, str] = {}
        problems: list[CopyProblem] = []
        for fetch in self.plan.fetches:
            if fetch.source == self.rank:
                problems += self._send(fetch.copy, fetch.target)
            elif fetch.target == self.rank:
                slot, path = self._scratch()
                received = receive_slot(slot, fetch.source)
                failpoint(FETCHING)
                if received.is_sealed:
                    fetched[fetch.copy.about.image] = path
                else:
                    problems.append(_problem(fetch.copy, received.problem or "a copy could not be read by its host"))
        gathered = self.context.groups.world.all_gather_text(json.dumps([fetched, problems]))
        host, paths = self.placements[self.rank].host, dict[str, str]()
        for rank, (theirs, wrong) in enumerate(map(json.loads, gathered)):
            problems += wrong if rank != self.rank else []
            paths |= theirs if self.placements[rank].host == host else {}
        return paths, problems

    def _send(self, copy: SnapshotCopy, to: int) -> list[CopyProblem]:
        try:
            slot: SealedSlot | None = SealedSlot(self._path(copy))
            problems: list[CopyProblem] = []
        except (SlotError, OSError) as error:
            slot, problems = None, [_problem(copy, str(error))]
        for work in send_slot(None if slot is None else slot.bytes, to):
            work.wait()
        return problems

    def _scratch(self) -> tuple[SnapshotSlot, str]:
        """Memory that lasts until all ranks of this host have read it."""
        fd = os.memfd_create("closeranks-fetched", os.MFD_CLOEXEC)
        self.stack.callback(os.close, fd)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        slot = SnapshotSlot(path)
        self.stack.callback(slot.close)
        return slot, path


def _problem(copy: SnapshotCopy, what: str) -> CopyProblem:
    return [copy.location.host, copy.location.local_index, copy.location.file, what]


def _note_beginning(context: RunContext, folder: Path) -> None:
    """Record the first attempt number under which this run saves: checkpoints with lower numbers belong to other runs,
    or to the one it was resumed from."""
    if not context.world.is_lead or not context.job.checkpoint.save:
        return
    path = folder / _BEGINNING
    try:
        first_attempt = next_attempt(checkpoint_place(context.job, folder), context.job.checkpoint.remote)
        folder.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps({"first_part": first_attempt}))
        path.with_suffix(".tmp").replace(path)
    except (OSError, SetupError):  # the save reports it; without the note no checkpoint counts as this run's own
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _first_attempt(context: RunContext, folder: Path) -> int:
    number = 0
    if context.world.is_lead:
        try:
            number = int(json.loads(read_text(folder / _BEGINNING))["first_part"])
        except (OSError, ValueError, KeyError):
            number = _NONE_OF_OURS
    return int(context.groups.world.broadcast_text(str(number)))

"""Saves one rank's part of a checkpoint to each storage tier.

The same on each tier: write the data file, read it back, publish the part; rank 0 then commits for all and applies
retention. Rank 0 holds the storage's lock from its first byte to its last removal, so that nothing is removed during a
save. The second tier is fed from the finished file of the first, or from the buffer if the first one failed.
Invariants: nothing raises, everything is reported; ``released`` is reported exactly once; what a failed attempt wrote
never counts, and is never removed once rank 0 may have relied on it; a committed save is never reported as failed, nor
does saving the same step of the same session again fail. Imports no torch: used by the writer process, and by a trainer
that waits for its save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache

from closeranks.checkpoint.format.data_file import (
    ChunkDigests,
    ChunkSource,
    SaveError,
    digest_chunk,
    read_back,
    write_data_file,
)
from closeranks.checkpoint.format.manifest import (
    CheckpointManifest,
    ChunkLocation,
    RankPart,
    data_name,
    encode_part,
    part_name,
)
from closeranks.checkpoint.save import references
from closeranks.checkpoint.save.commit import (
    commit,
    encode_failure,
    failure_name,
    gather_parts,
    read_committed,
    repair_latest,
)
from closeranks.checkpoint.save.retention import RetentionPolicy, apply_retention, clear_unfinished
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, SaveTask, StorageTier, session_token
from closeranks.core.errors import CloseranksError
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import Storage, StorageError

ORDERED = declare_failpoint("save.ordered", "a save order was accepted; nothing is written yet")
READ_BACK = declare_failpoint(
    "save.read_back", "a rank's data was read back intact from storage; its part is not published"
)
PART_PUBLISHED = declare_failpoint("save.part_published", "a rank's part is published")

_LOCK_WAIT_S = 120.0
"""How long a save waits at most for a prune, or for the lease of a writer that was killed."""
_log = logging.getLogger(__name__)


class SupersededError(SaveError):
    """A later save was requested: this one is no longer wanted."""


class BufferRelease:
    """Reports once that the buffer is free."""

    def __init__(self, task: SaveTask, report: Callable[[SaveReport], None]) -> None:
        self._report: Callable[[], None] = lambda: report(SaveReport("released", task.save, task.step))

    def __call__(self) -> None:
        release, self._report = self._report, lambda: None
        release()


@dataclass(frozen=True, slots=True)
class TierSave:
    """One save on one tier."""

    order: SaveTask
    tier: StorageTier
    place: str
    source: ChunkSource
    settings: SaveSettings
    report: Callable[[SaveReport], None]
    is_superseded: Callable[[], bool]
    """Called between chunks and while waiting; the writer process also sends its heartbeat from it."""
    release: Callable[[], None]
    protected: Callable[[], Collection[str]] = tuple
    """Checkpoints of this storage that another tier still reads from."""
    known: Mapping[int, ChunkDigests] = field(default_factory=dict)
    """Digests that need not be computed again, by index of the chunk."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def storage(self) -> Storage:
        return _opened(self.place)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    def path(self, name: str) -> str:
        return f"{self.order.folder}/{name}"

    def check_cancelled(self) -> None:
        if self.is_superseded():
            raise SupersededError("a later save was requested before this one finished")


@cache
def _opened(place: str) -> Storage:
    """One per place for the life of the process, to keep an object store's connections open."""
    return open_storage(place)


def save_to_all_tiers(
    task: SaveTask,
    source: ChunkSource,
    settings: SaveSettings,
    report: Callable[[SaveReport], None],
    is_superseded: Callable[[], bool],
) -> None:
    """One save on all tiers, one after the other."""
    release = BufferRelease(task, report)
    part = save_primary(task, source, settings, report, is_superseded, release)
    if wants_remote(task, settings):
        save_remote(task, source, part, settings, report, is_superseded, release)
    release()


def wants_remote(task: SaveTask, settings: SaveSettings) -> bool:
    return bool(settings.remote) and task.to_remote


def publish_failure(task: SaveTask, settings: SaveSettings, why: str) -> None:
    """For a rank whose save failed before it got here: tells rank 0 on every tier not to wait for its part. Never
    raises; for a place that cannot be reached it blocks while requests are retried, and rank 0 waits for its
    timeout."""
    publish_failure_at(settings.place, task, why)
    if wants_remote(task, settings):
        publish_failure_at(settings.remote, task, why)


def publish_failure_at(place: str, task: SaveTask, why: str) -> None:
    """The same in one place. Does nothing on rank 0, which no rank waits for."""
    if task.rank == 0:
        return
    path = f"{task.folder}/{failure_name(task.rank, task.num_ranks)}"
    try:
        _opened(place).publish(path, encode_failure(task, why), replace=True)
    except Exception as error:  # the failure itself is reported elsewhere
        _log.warning("rank %d could not tell %s that it does not save %s: %s", task.rank, place, task.folder, error)


def save_primary(
    task: SaveTask,
    source: ChunkSource,
    settings: SaveSettings,
    report: Callable[[SaveReport], None],
    is_superseded: Callable[[], bool],
    release: Callable[[], None],
    protected: Callable[[], Collection[str]] = tuple,
) -> RankPart | None:
    """Returns the part that was written and read back, None on failure: the buffer is then not free if another tier
    needs it."""
    return _save_tier(
        TierSave(task, "primary", settings.place, source, settings, report, is_superseded, release, protected)
    )


def save_remote(
    task: SaveTask,
    source: ChunkSource,
    primary: RankPart | None,
    settings: SaveSettings,
    report: Callable[[SaveReport], None],
    is_superseded: Callable[[], bool],
    release: Callable[[], None],
) -> None:
    """Save from the primary tier's files if there are any, else from ``source``; releases the buffer in either case
    when done."""
    known: dict[int, ChunkDigests] = {}
    if primary is not None:
        known = {number: ChunkDigests(entry.blake3, entry.digest_term) for number, entry in enumerate(primary.entries)}
        source = _from_files(settings.place, task.folder, primary)
    _save_tier(TierSave(task, "remote", settings.remote, source, settings, report, is_superseded, release, known=known))
    release()


def _from_files(place: str, folder: str, part: RankPart) -> ChunkSource:
    def read(number: int) -> memoryview:
        entry = part.entries[number]
        path = entry.file if "/" in entry.file else f"{folder}/{entry.file}"
        return memoryview(_opened(place).read(path, entry.offset, entry.chunk.num_bytes))

    return read


def _save_tier(save: TierSave) -> RankPart | None:
    part: RankPart | None = None
    is_lead, is_committed = save.order.rank == 0, False
    try:
        with _held(save):
            if is_lead:
                _clear(save)
            failpoint(ORDERED)
            counts = _counting(save)
            if counts is None:
                part = _write_part(save)
                # From here on rank 0 may commit at any moment, even if this call raises: nothing is withdrawn.
                save.storage.publish(save.path(_name(save.order)), encode_part(part), replace=True)
                failpoint(PART_PUBLISHED)
                counts = _commit(save, part) if is_lead else None
            else:
                _accept(save)
            if counts is not None and is_lead:
                _report_committed(save, counts)
                is_committed = True
                _collect(save)
    except (SaveError, StorageError, CloseranksError) as error:
        _fail(save, str(error), is_committed)
    except OSError as error:  # from a disk or an object store, not translated by the storage
        _fail(save, os.strerror(error.errno) if error.errno else str(error), is_committed)
    except Exception as error:  # whatever it is, training continues and the failure is reported
        _log.exception("saving %s failed", save.order.folder)
        _fail(save, f"{type(error).__name__}: {error}", is_committed)
    return part


def _fail(save: TierSave, why: str, is_committed: bool) -> None:
    task = save.order
    if is_committed:  # for example, the lock could not be released: no reason to save again
        _log.warning("%s was saved to %s, but then: %s", task.folder, save.place, why)
        return
    what = f"step {task.step} was not saved to {save.place}: {why}"
    save.report(SaveReport("failed", task.save, task.step, save.tier, what=what, seconds=save.seconds))


def _clear(save: TierSave) -> None:
    """Remove what unfinished saves left; if that fails it costs space, not this save."""
    task = save.order
    try:
        clear_unfinished(save.storage, task.folder, save.protected())
    except (StorageError, CloseranksError) as error:
        what = f"leftovers of unfinished saves could not be removed: {error}"
        save.report(SaveReport("collected", task.save, task.step, save.tier, what))


def _counting(save: TierSave) -> CheckpointManifest | None:
    """The manifest if an earlier attempt of this session has already committed this step."""
    task = save.order
    found = read_committed(save.storage, task.folder)
    if found is not None and (session_token(found.save), found.step) != (session_token(task.save), task.step):
        raise SaveError(f"{task.folder} is already a checkpoint")
    return found


def _accept(save: TierSave) -> None:
    """The step is already committed, though an earlier report may have said otherwise: all that is left is to report
    it."""
    if save.order.rank == 0:
        with suppress(StorageError):  # the next commit updates ``latest``
            repair_latest(save.storage, save.order.folder)
    _written(save, "", 0)


@contextmanager
def _held(save: TierSave) -> Iterator[None]:
    if save.order.rank != 0:
        yield
        return
    wait_s = min(save.settings.timeout_s, _LOCK_WAIT_S)
    with save.storage.lock(f"the run that saves {save.order.folder}", wait_s=wait_s):
        yield


def _write_part(save: TierSave) -> RankPart:
    """Write the data and read it back, then release the buffer. On failure everything is withdrawn."""
    task, storage = save.order, save.storage
    try:
        stale = set(storage.names(task.folder))
        for name in {_name(task), failure_name(task.rank, task.num_ranks)} & stale:
            storage.remove(save.path(name))
        part = _write_data(save)
    except Exception as error:
        _withdraw(save, error)
        raise
    save.release()
    return part


def _name(task: SaveTask) -> str:
    return part_name(task.rank, task.num_ranks)


def _withdraw(save: TierSave, error: Exception) -> None:
    """Best effort; rank 0 is told of the failure, or waits for its timeout."""
    task = save.order
    with suppress(StorageError):
        save.storage.remove(save.path(data_name(task.rank, task.num_ranks)))
    if not isinstance(error, SupersededError):
        publish_failure_at(save.place, task, str(error))


def _write_data(save: TierSave) -> RankPart:
    task = save.order
    known, referred = _references(save)
    fresh = {number: chunk for number, chunk in enumerate(task.chunks) if number not in referred}
    name = data_name(task.rank, task.num_ranks)
    path = save.path(name)
    if not fresh:
        _written(save, path, 0)
        return RankPart(task.rank, task.num_ranks, task.save, (), tuple(referred.values()))
    file, plan, digests = write_data_file(save.storage, path, fresh, save.source, known, save.check_cancelled)
    _written(save, path, file.num_bytes)
    if save.settings.read_back:
        read_back(save.storage, path, file, fresh.values(), save.check_cancelled)
        failpoint(READ_BACK)
    for number, offset in zip(fresh, plan.offsets, strict=True):
        mine = digests[number]
        referred[number] = ChunkLocation(task.chunks[number], name, offset, mine.blake3, mine.digest_term)
    entries = tuple(referred[number] for number in range(len(task.chunks)))
    return RankPart(task.rank, task.num_ranks, task.save, (file,), entries)


def _written(save: TierSave, path: str, num_bytes: int) -> None:
    task = save.order
    where = f"{save.storage.url}/{path}" if num_bytes else ""
    save.report(SaveReport("written", task.save, task.step, save.tier, "", where, num_bytes, save.seconds))
    # Not if the second tier may need the buffer, because this tier's file fails its read-back.
    if save.tier == "remote" or not wants_remote(task, save.settings):
        save.release()


def _references(save: TierSave) -> tuple[dict[int, ChunkDigests], dict[int, ChunkLocation]]:
    """The digests known so far, and the chunks that need not be written because an earlier checkpoint has them."""
    known = dict(save.known)
    base = None if save.order.is_full else references.read_base_manifest(save.storage)
    if base is None:
        return known, {}
    found = references.existing_references(save.storage, references.reference_candidates(base, save.order.chunks))
    referred: dict[int, ChunkLocation] = {}
    for number, entry in found.items():
        if number not in known:
            known[number] = digest_chunk(save.order.chunks[number], save.source(number))
        if known[number].blake3 == entry.blake3:
            referred[number] = entry
        save.check_cancelled()
    return known, referred


def _commit(save: TierSave, own: RankPart) -> CheckpointManifest:
    parts = gather_parts(save.storage, save.order, own, save.settings.timeout_s, save.check_cancelled)
    return commit(save.storage, save.order, parts)


def _report_committed(save: TierSave, manifest: CheckpointManifest) -> None:
    task, path = save.order, f"{save.storage.url}/{save.order.folder}"
    save.report(SaveReport("committed", task.save, task.step, save.tier, "", path, manifest.num_bytes, save.seconds))


def _collect(save: TierSave) -> None:
    task, storage, settings = save.order, save.storage, save.settings
    policy = RetentionPolicy(settings.keep_last, settings.keep_every, settings.keep_best)
    try:
        names = apply_retention(storage, policy, task.folder, save.protected())
    except (StorageError, CloseranksError) as error:  # the checkpoint is committed; the next save retries retention
        save.report(SaveReport("collected", task.save, task.step, save.tier, f"nothing more could be removed: {error}"))
    else:
        if names:
            save.report(SaveReport("collected", task.save, task.step, save.tier, names=names))

"""Commits a checkpoint: turns the files of all ranks into one checkpoint that counts.

Rank 0's writer waits for the part document of every rank, checks that the parts make up the whole state, and publishes
the manifest; then it updates ``latest``. Invariants: a manifest exists only if every tensor is covered exactly once by
bytes that are there; a kill at any moment leaves the checkpoint either uncommitted or committed, never in between; once
the manifest is published nothing fails any more; committing the same save again changes nothing. Imports no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, prod

from blake3 import blake3

from closeranks.checkpoint.format.data_file import SaveError
from closeranks.checkpoint.format.documents import seal, unseal
from closeranks.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    CheckpointManifest,
    ChunkLocation,
    LatestPointer,
    RankPart,
    decode_latest,
    decode_manifest,
    decode_part,
    encode_latest,
    encode_manifest,
    part_name,
)
from closeranks.checkpoint.save.references import missing_files
from closeranks.checkpoint.save.retention import age_key
from closeranks.checkpoint.save.save_task import SaveTask
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.reshard import plan_copies
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.protocol import ExistsError, MissingError, Storage, StorageError

PARTS_GATHERED = declare_failpoint(
    "commit.parts_gathered", "the parts of all ranks are present and cover the whole state"
)
MANIFEST_PUBLISHED = declare_failpoint(
    "commit.manifest_published", "the checkpoint is valid; latest names the previous one"
)
PARTS_REMOVED = declare_failpoint("commit.parts_removed", "the checkpoint is valid and its part documents are removed")
LATEST_PUBLISHED = declare_failpoint(
    "commit.latest_published", "latest names the new checkpoint; no old one is removed yet"
)

_PAUSES_S = (0.1, 0.4)
"""Pauses before ``latest`` is published again: a local disk does not retry by itself."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PollInterval:
    """Polling interval: short at first, since most ranks finish at the same time, then growing."""

    first_s: float
    most_s: float


LOCAL, REMOTE = PollInterval(0.01, 0.25), PollInterval(0.5, 2.0)


def read_committed(storage: Storage, folder: str) -> CheckpointManifest | None:
    """The manifest in a folder; None if there is none."""
    path = f"{folder}/{MANIFEST}"
    try:
        return decode_manifest(storage.read(path), path)
    except MissingError:
        return None


def gather_parts(
    storage: Storage, task: SaveTask, own: RankPart, timeout_s: float, check_cancelled: Callable[[], None]
) -> tuple[RankPart, ...]:
    """The parts of this save, by rank; waits for those of the other ranks. ``check_cancelled`` may raise to cancel."""
    interval = LOCAL if storage.is_local else REMOTE
    found, until, pause_s = {own.rank: own}, time.monotonic() + timeout_s, interval.first_s
    while True:
        missing = [rank for rank in range(task.num_ranks) if rank not in found]
        names = set(storage.names(task.folder)) if missing else set()
        for rank in missing:
            part = _part(storage, task, rank, names)
            if part is not None:
                found[rank] = part
        missing = [rank for rank in missing if rank not in found]
        if not missing:
            return tuple(found[rank] for rank in range(task.num_ranks))
        if time.monotonic() >= until:
            ranks = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
            who = f"rank{'s' if len(missing) > 1 else ''} {ranks}"
            raise SaveError(f"no report from {who} in {timeout_s:g} s, so {task.folder} stays unfinished")
        check_cancelled()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, interval.most_s)


def _part(storage: Storage, task: SaveTask, rank: int, names: set[str]) -> RankPart | None:
    """The part that a rank has published for this save, if any; documents left by another save are ignored."""
    failure, name = failure_name(rank, task.num_ranks), part_name(rank, task.num_ranks)
    if failure in names:
        with suppress(MissingError):  # of an earlier attempt: its writer has just started over
            body = unseal("failure", storage.read(f"{task.folder}/{failure}"), failure)
            if body["save"] == task.save:
                raise SaveError(f"rank {rank} could not save: {body['what']}")
    if name not in names:
        return None
    try:
        part = decode_part(storage.read(f"{task.folder}/{name}"), f"{task.folder}/{name}")
    except MissingError:  # its writer has just started over
        return None
    return part if part.save == task.save else None


def failure_name(rank: int, num_ranks: int) -> str:
    return part_name(rank, num_ranks).replace("part-", "failure-")


def encode_failure(task: SaveTask, what: str) -> bytes:
    """The document that a rank publishes if it cannot save, so that rank 0 need not wait for it."""
    return seal("failure", {"save": task.save, "rank": task.rank, "what": what})


def coverage_problem(parts: Sequence[RankPart]) -> str:
    """Why the parts do not cover each tensor of the state exactly once; empty if they do."""
    tensors: dict[tuple[str, str], list[ChunkLocation]] = {}
    for part in parts:
        for entry in part.entries:
            tensors.setdefault((entry.chunk.section, entry.chunk.key), []).append(entry)
    for (section, key), entries in tensors.items():
        what = _tensor_problem(entries)
        if what:
            return f"{section}/{key} {what}"
    return ""


def _tensor_problem(entries: Sequence[ChunkLocation]) -> str:
    first = entries[0].chunk
    if any((entry.chunk.dtype, entry.chunk.piece.shape) != (first.dtype, first.piece.shape) for entry in entries):
        return "was saved with two dtypes or shapes"
    whole = prod(first.piece.shape)
    num_elements = sum(entry.chunk.piece.numel for entry in entries)
    num_bytes = sum(entry.chunk.num_bytes for entry in entries)
    if whole and any(entry.chunk.num_bytes * num_elements != num_bytes * entry.chunk.piece.numel for entry in entries):
        return "has chunks whose sizes do not match their elements"
    # In memory order, so that what remains to be covered stays one or two boxes.
    pieces = sorted((entry.chunk.piece for entry in entries), key=lambda piece: (piece.start, piece.flat or (0, 0)))
    if plan_copies(Piece.whole(first.key, first.piece.shape), pieces).missing:
        return f"is incomplete: the ranks hold {num_elements} of its {whole} elements"
    if num_elements != whole:  # everything is covered, so something is there twice
        return f"was partly saved more than once: {num_elements} elements for {whole}"
    return ""


def check_file_sizes(storage: Storage, folder: str, parts: Iterable[RankPart]) -> None:
    """Check that every file the manifest will name exists and has the right size."""
    for part in parts:
        for file in part.files:
            if storage.size(f"{folder}/{file.name}") != file.num_bytes:
                raise SaveError(f"{storage.url}/{folder}/{file.name} differs in size from what rank {part.rank} wrote")
        for name in missing_files(part.entries, storage.size):
            raise SaveError(f"{storage.url}/{name}, which rank {part.rank} refers to, is missing or truncated")


def commit(storage: Storage, task: SaveTask, parts: Sequence[RankPart]) -> CheckpointManifest:
    """Commit the checkpoint. An error before the manifest is published leaves it uncommitted; after that nothing
    raises."""
    what = coverage_problem(parts)
    if what:
        raise SaveError(f"the ranks' parts of {task.folder} are inconsistent: {what}")
    check_file_sizes(storage, task.folder, parts)
    failpoint(PARTS_GATHERED)
    manifest = _manifest(task, parts)
    data = encode_manifest(manifest)
    path = f"{task.folder}/{MANIFEST}"
    try:
        storage.publish(path, data)
    except ExistsError:
        data = storage.read(path)
        manifest = decode_manifest(data, path)
        if manifest.save != task.save:
            raise SaveError(f"{storage.url}/{task.folder} is already a checkpoint, from another save") from None
    failpoint(MANIFEST_PUBLISHED)
    for rank in range(task.num_ranks):
        with suppress(StorageError):  # the next retention run removes it
            storage.remove(f"{task.folder}/{part_name(rank, task.num_ranks)}")
    failpoint(PARTS_REMOVED)
    _publish_latest(storage, LatestPointer(task.folder, blake3(data).hexdigest()))
    failpoint(LATEST_PUBLISHED)
    return manifest


def repair_latest(storage: Storage, folder: str) -> None:
    """For a committed checkpoint: if ``latest`` is damaged or names an older one, the commit was interrupted, and
    ``latest`` is written again."""
    try:
        named = decode_latest(storage.read(LATEST), LATEST).name
    except (MissingError, CheckpointError):
        named = ""
    if age_key(named) < age_key(folder):
        _publish_latest(storage, LatestPointer(folder, blake3(storage.read(f"{folder}/{MANIFEST}")).hexdigest()))


def _publish_latest(storage: Storage, latest: LatestPointer) -> None:
    """Publish ``latest``. The checkpoint is committed without it, so a failure here does not fail the save; the next
    commit updates it."""
    pauses = iter(_PAUSES_S)
    while True:
        try:
            storage.publish(LATEST, encode_latest(latest), replace=True)
        except StorageError as error:
            pause_s = None if error.is_final else next(pauses, None)
            if pause_s is None:
                _log.warning("%s is valid, but %s/%s does not name it: %s", latest.name, storage.url, LATEST, error)
                return
            time.sleep(pause_s)
        else:
            return


def _manifest(task: SaveTask, parts: Sequence[RankPart]) -> CheckpointManifest:
    if task.tree is None:
        raise CheckpointError(f"the order to save step {task.step} lacks the state's tree")
    entries = tuple(entry for part in parts for entry in part.entries)
    return CheckpointManifest(
        name=task.folder,
        step=task.step,
        save=task.save,
        num_ranks=task.num_ranks,
        layout=task.layout,
        created=time.time(),
        is_full=not any("/" in entry.file for entry in entries),
        metric=task.metric if task.metric is not None and isfinite(task.metric) else None,
        tree=task.tree,
        files=tuple(file for part in parts for file in part.files),
        entries=entries,
    )

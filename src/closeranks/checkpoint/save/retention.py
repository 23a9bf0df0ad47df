"""Retention: decides which checkpoints are removed, and removes them without any file that is still needed.

Only rank 0's writer (between its own saves) and ``closeranks ckpt prune`` remove checkpoints; both hold the storage's
lock, as every save does. Invariants: the newest two certified checkpoints are kept, and the one ``latest`` names; so is
every file that a kept checkpoint refers to, and every folder that a save may be working in. Manifests are removed
first: a kill during removal leaves files that nothing needs, never a checkpoint without its files. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from closeranks.checkpoint.format.manifest import LATEST, MANIFEST, decode_latest, decode_manifest, parse_folder
from closeranks.checkpoint.format.manifest_validation import read_document, validate_head
from closeranks.core.errors import CheckpointError
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.protocol import DeniedError, MissingError, Storage

MANIFEST_REMOVED = declare_failpoint(
    "collect.manifest_removed", "a checkpoint is no longer valid; its files are still there"
)
FILE_REMOVED = declare_failpoint("collect.file_removed", "an unreferenced file was removed")
FOLDER_REMOVED = declare_failpoint("collect.folder_removed", "all files of a checkpoint are removed")
COLLECTED = declare_failpoint("collect.done", "everything that retention does not keep is removed")

_CHECKPOINT_FILE = re.compile(r"(data|part|failure)-\d+-of-\d+\.(safetensors|json)")


class RetentionCandidate(Protocol):
    """A checkpoint as retention sees it; a ``CheckpointManifest`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def metric(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The checkpoints to keep besides those that are always kept."""

    last: int
    every: int = 0
    best: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint according to its manifest: its own and those it refers to."""

    name: str
    step: int
    metric: float | None
    own: frozenset[str]
    referenced: frozenset[str]

    def needed_files(self) -> Iterable[str]:
        return self.referenced | {f"{self.name}/{file}" for file in self.own}


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """One checkpoint's folder as it is in the storage."""

    name: str
    files: tuple[str, ...]
    contents: CheckpointFiles | None
    """None if it has no manifest, or one that cannot be read."""

    @property
    def age(self) -> tuple[int, int]:
        return age_key(self.name)


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What to remove, in this order. Names are relative to the storage."""

    checkpoints: tuple[str, ...]
    """Checkpoints whose manifests are removed first."""
    files: tuple[str, ...]
    folders: tuple[str, ...]
    """Folders in which no file is needed any more."""


def age_key(name: str) -> tuple[int, int]:
    """A sort key that grows with time: later attempts of a run started later, whatever step they started at."""
    step, part = parse_folder(name) or (-1, -1)
    return part, step


def expired(
    manifests: Sequence[RetentionCandidate], keep_last: int, keep_every: int, keep_best: int
) -> tuple[str, ...]:
    """Names of the checkpoints that retention removes, oldest first."""
    newest = sorted(manifests, key=lambda manifest: age_key(manifest.name), reverse=True)
    kept = {manifest.name for manifest in newest[: max(keep_last, 2)]}
    if keep_every:
        kept |= {manifest.name for manifest in newest if manifest.step % keep_every == 0}
    rated = [
        (manifest.metric, place, manifest.name) for place, manifest in enumerate(newest) if manifest.metric is not None
    ]
    kept |= {name for _, _, name in sorted(row for row in rated if isfinite(row[0]))[:keep_best]}
    return tuple(manifest.name for manifest in reversed(newest) if manifest.name not in kept)


def plan_removal(
    folders: Sequence[CheckpointFolder], policy: RetentionPolicy | None, before: str, protected: Collection[str] = ()
) -> RemovalPlan:
    """``before``: folders without a manifest are removed if they are older than this one; ``protected`` are kept in any
    case. Without ``policy`` every checkpoint is kept. A folder with a damaged manifest is left for a person to look
    at."""
    held = [folder.contents for folder in folders if folder.contents is not None]
    expired_names = set(expired(held, policy.last, policy.every, policy.best) if policy else ()) - set(protected)
    needed = {file for contents in held if contents.name not in expired_names for file in contents.needed_files()}
    files: list[str] = []
    whole: list[str] = []
    for folder in folders:
        is_unfinished = MANIFEST not in folder.files and folder.age < age_key(before) and folder.name not in protected
        paths = [f"{folder.name}/{file}" for file in folder.files]
        if (folder.name in expired_names or is_unfinished) and not needed.intersection(paths):
            whole.append(folder.name)
        elif (
            folder.name in expired_names
            or is_unfinished
            or (folder.contents is not None and folder.name not in protected)
        ):
            # In a folder that is kept: what a killed commit, or an attempt with another layout, left behind.
            files += [
                path for path in paths if path not in needed and _CHECKPOINT_FILE.fullmatch(path.rpartition("/")[2])
            ]
    checkpoints = tuple(sorted(expired_names, key=age_key))
    return RemovalPlan(checkpoints, tuple(sorted(files)), tuple(sorted(whole, key=age_key)))


def list_folders(storage: Storage, *, only_if_unfinished: bool = False) -> tuple[CheckpointFolder, ...]:
    """All checkpoint folders. Reads every manifest, unless ``only_if_unfinished`` is set and no folder lacks one. A
    manifest that cannot be read because of a storage error raises: nothing may be decided without it."""
    names = [name.rstrip("/") for name in storage.names() if name.endswith("/") and parse_folder(name)]
    found = {name: tuple(storage.names(name)) for name in names}
    if only_if_unfinished and all(MANIFEST in files for files in found.values()):
        return ()
    return tuple(CheckpointFolder(name, files, _contents(storage, name, files)) for name, files in found.items())


def _contents(storage: Storage, name: str, files: tuple[str, ...]) -> CheckpointFiles | None:
    path = f"{name}/{MANIFEST}"
    if MANIFEST not in files:
        return None
    try:
        manifest = decode_manifest(read_document(storage, path), path)
        validate_head(manifest, name)
    except (CheckpointError, MissingError):
        return None
    own = frozenset(file.name for file in manifest.files)
    return CheckpointFiles(name, manifest.step, manifest.metric, own, manifest.referenced_files())


def named_by_latest(storage: Storage) -> tuple[str, ...]:
    try:
        return (decode_latest(read_document(storage, LATEST), LATEST).name,)
    except (MissingError, CheckpointError):
        return ()


def apply_removal(storage: Storage, what: RemovalPlan) -> None:
    """Carry out the plan; the caller holds the lock."""
    for name in what.checkpoints:
        storage.remove(f"{name}/{MANIFEST}")
        failpoint(MANIFEST_REMOVED)
    for file in what.files:
        storage.remove(file)
        failpoint(FILE_REMOVED)
    for name in what.folders:
        storage.remove_folder(name)
        failpoint(FOLDER_REMOVED)


def apply_retention(
    storage: Storage, policy: RetentionPolicy, committed: str, protected: Collection[str] = ()
) -> tuple[str, ...]:
    """Apply retention after a commit; the caller holds the lock. Returns the names of the removed checkpoints."""
    what = plan_removal(list_folders(storage), policy, committed, (*protected, *named_by_latest(storage)))
    apply_removal(storage, what)
    with suppress(DeniedError):  # an object store may refuse to list its uploads
        storage.remove_stale()
    failpoint(COLLECTED)
    return what.checkpoints


def clear_unfinished(storage: Storage, saving: str, protected: Collection[str] = ()) -> None:
    """Make room before a save: remove what failed or killed saves left. The caller holds the lock and is about to save
    ``saving``."""
    folders = list_folders(storage, only_if_unfinished=True)
    apply_removal(storage, plan_removal(folders, None, saving, (*protected, saving)))

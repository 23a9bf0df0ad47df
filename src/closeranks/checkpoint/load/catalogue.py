"""Lists the checkpoints at a place, in the order in which a run should try to resume from them.

Inspects the folders and manifests themselves; ``latest`` only says which comes first. Invariants: a checkpoint is
committed by its sealed manifest alone, so that a missing, damaged or stale ``latest`` does no harm; everything that
does not count is listed with its reason, never silently left out. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from closeranks.checkpoint.format.digests import blake3_hex
from closeranks.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    CheckpointManifest,
    LatestPointer,
    decode_latest,
    parse_folder,
)
from closeranks.checkpoint.format.manifest_validation import read_document, validate_manifest
from closeranks.core.errors import CheckpointError
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import MissingError, Storage, StorageError

FOLDER = "checkpoints"
"""Name of the checkpoints' folder in a run's folder."""

CheckpointStatus = Literal["certified", "suspect", "damaged", "unfinished", "serving"]
"""``suspect``: sealed, but not the manifest that ``latest`` was written for; ``serving``: no longer a checkpoint
itself, but other checkpoints need its files."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint's folder."""

    storage: Storage
    """The root that holds the checkpoints."""
    name: str
    step: int
    attempt: int
    manifest: CheckpointManifest | None
    problem: str
    """Why it does not count, or should be tried last; empty: no problem is known."""
    is_latest: bool
    status: CheckpointStatus
    blake3: str = ""
    """BLAKE3 of the manifest's bytes."""

    @property
    def path(self) -> str:
        return f"{self.storage.url}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckpointIssue:
    """Something about a place that a person should know."""

    what: str
    is_damage: bool
    """False: nothing was lost, for example an interrupted save, or files that are not ours."""
    name: str = ""
    """The checkpoint it is about, whose own ``problem`` says the same."""

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Catalogue:
    place: str
    found: tuple[FoundCheckpoint, ...]
    """Newest first: by attempt of the run, then by step."""
    problems: tuple[CheckpointIssue, ...]
    """Problems of the place itself: a damaged ``latest``, one that names a missing checkpoint, a folder that is not
    ours."""

    def __iter__(self) -> Iterator[FoundCheckpoint]:
        return iter(self.found)

    @property
    def latest(self) -> FoundCheckpoint | None:
        """The checkpoint that ``latest`` names, if its manifest is the one ``latest`` was written for; of several
        places, the newest such checkpoint."""
        return next((found for found in self.found if found.is_latest and found.status == "certified"), None)

    def candidates(self) -> tuple[FoundCheckpoint, ...]:
        """Checkpoints to try in this order: the one ``latest`` names, then newest to oldest, and suspect ones last.

        Damaged ones are included: the caller skips them and logs the reason, so that a place with only damaged
        checkpoints is never taken for an empty one.
        """
        candidates = [found for found in self.found if found.status in ("certified", "damaged")]
        first = [found for found in candidates if found.is_latest][:1]
        rest = [found for found in candidates if found not in first]
        return (*first, *rest, *(found for found in self.found if found.status == "suspect"))


def find_checkpoints(place: str, also: Sequence[str] = ()) -> Catalogue:
    """``place``: a run's folder, a folder of checkpoints, one checkpoint, or a URL of those; ``also``: further places,
    such as the second tier of a run. Of two copies of one checkpoint, that of the first place comes first.

    A place that cannot be read is listed as a problem if another one has checkpoints. If none has, this raises: there
    may be checkpoints that cannot be seen.
    """
    found: list[FoundCheckpoint] = []
    problems: list[CheckpointIssue] = []
    unseen: list[CheckpointError] = []
    for one in (place, *also):
        try:
            there = _at(one)
        except CheckpointError as error:
            unseen.append(error)
            problems.append(CheckpointIssue(error.what, True))
            continue
        found += there.found
        problems += there.problems
    if unseen and not found:
        raise unseen[0]
    found.sort(key=lambda one: (one.attempt, one.step), reverse=True)  # stable, so places keep their order
    return Catalogue(place, tuple(found), tuple(problems))


def _at(place: str) -> Catalogue:
    storage = open_storage(place)
    try:
        names = storage.names()
        if _is_checkpoint(storage.url, names):
            parent, _, name = storage.url.rstrip("/").rpartition("/")
            return _scan(open_storage(parent or "/"), [f"{name}/"], is_all=False)
        if f"{FOLDER}/" in names and not _folders(names):
            storage = open_storage(f"{storage.url.rstrip('/')}/{FOLDER}")
            names = storage.names()
        return _scan(storage, names, is_all=True)
    except StorageError as error:
        raise CheckpointError(f"{place} cannot be read: {error}", "Give a path or URL that can be read.") from error


def _is_checkpoint(url: str, names: Sequence[str]) -> bool:
    is_named_so = parse_folder(url.rstrip("/").rpartition("/")[2]) is not None
    return MANIFEST in names or (is_named_so and bool(names) and not _folders(names))


def _folders(names: Sequence[str]) -> list[str]:
    return [name.rstrip("/") for name in names if name.endswith("/") and parse_folder(name) is not None]


def _scan(storage: Storage, names: Sequence[str], *, is_all: bool) -> Catalogue:
    """``is_all``: the names are those of a whole root, else of the one folder that was asked for."""
    folders = _folders(names) if is_all else [name.rstrip("/") for name in names]
    found = [_examine(storage, name) for name in folders]
    latest, issues = _read_latest(storage)
    if latest is not None:
        found = [_with_status(one, latest) for one in found]
        issues += [
            CheckpointIssue(f"{storage.url}/{LATEST} names {one.name}: {one.problem}", True, one.name)
            for one in found
            if one.is_latest and one.problem
        ]
        if not any(one.is_latest for one in found):
            issues.append(CheckpointIssue(f"{storage.url}/{LATEST} names {latest.name}, which does not exist", True))
    elif not issues and any(one.manifest for one in found):
        issues.append(CheckpointIssue(f"{storage.url}/{LATEST} is missing; the manifests were read instead", False))
    unknown = [name for name in names if name != LATEST and name.rstrip("/") not in folders]
    if unknown:
        more = f" and {len(unknown) - 1} more are" if len(unknown) > 1 else " is"
        issues.append(CheckpointIssue(f"{storage.url}/{unknown[0]}{more} not written by closeranks; ignored", False))
    return Catalogue(storage.url, tuple(_serving(found)), tuple(issues) if is_all else ())


def _read_latest(storage: Storage) -> tuple[LatestPointer | None, list[CheckpointIssue]]:
    survived = "the manifests were read instead"
    try:
        return decode_latest(read_document(storage, LATEST), f"{storage.url}/{LATEST}"), []
    except MissingError:
        return None, []
    except CheckpointError as error:
        return None, [CheckpointIssue(f"{error.what}; {survived}", True)]
    except StorageError as error:
        return None, [CheckpointIssue(f"{storage.url}/{LATEST} cannot be read: {error}; {survived}", True)]


def _examine(storage: Storage, name: str) -> FoundCheckpoint:
    step, part = parse_folder(name) or (0, 1)
    path = f"{storage.url}/{name}"
    manifest, problem, digest = None, "", ""
    state: CheckpointStatus = "certified"
    try:
        data = read_document(storage, f"{name}/{MANIFEST}")
        manifest, digest = validate_manifest(data, path), blake3_hex(data)
        step, part = parse_folder(manifest.name) or (step, part)
    except MissingError:
        state, problem = "unfinished", f"it has no {MANIFEST}: the save was interrupted, or is still running"
    except CheckpointError as error:
        state, problem = "damaged", error.what
    except StorageError as error:
        state, problem = "damaged", f"its {MANIFEST} cannot be read: {error}"
    return FoundCheckpoint(storage, name, step, part, manifest, problem, False, state, digest)


def _with_status(found: FoundCheckpoint, latest: LatestPointer) -> FoundCheckpoint:
    """The folder's entry, updated with what ``latest`` says about it."""
    if found.name != latest.name:
        return found
    if found.status == "certified" and found.blake3 != latest.blake3:
        problem = f"its {MANIFEST} is not the one that {LATEST} was written for"
        return replace(found, is_latest=True, status="suspect", problem=problem)
    return replace(found, is_latest=True)


def _serving(found: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Mark folders whose manifest was removed by retention, but whose files other checkpoints refer to."""
    needed: dict[str, str] = {}
    for one in reversed(found):
        for file in one.manifest.referenced_files() if one.manifest else ():
            needed[file.partition("/")[0]] = one.name
    return [
        replace(one, status="serving", problem=f"it was removed; {needed[one.name]} still needs its files")
        if one.status == "unfinished" and one.name in needed
        else one
        for one in found
    ]

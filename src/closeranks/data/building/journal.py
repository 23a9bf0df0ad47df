"""Records which parts of a build are finished, and decides whether a folder may be built into.

During a build the folder holds ``.build/plan.json`` (identifies the build, kept permanently) and one document for each
finished part. Invariants: a part's document is written only after its shards are complete; a folder that contains one
build is never used for another; files that no build wrote are never removed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from closeranks.core.errors import DataError, SetupError
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.regular_file import read_bytes
from closeranks.data.building.build_spec import BuildSpec, PartCounts, PartDone
from closeranks.data.building.readers.input_files import fingerprint
from closeranks.storage.documents import UnsoundDocument, seal, unseal
from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import StorageError

FOLDER = ".build"
_PLAN = "plan.json"
_LOCK = "lock"
_VERSION = 1

PART_WRITTEN = declare_failpoint("build.part_written", "a part's shards are finished; its document is not written")
PART_NOTED = declare_failpoint("build.part_noted", "a part's document is written")
PARTS_DONE = declare_failpoint("build.parts_done", "all parts are done; dataset.json is not written")
DESCRIBED = declare_failpoint("build.described", "dataset.json is written; temporary files of the build remain")


@dataclass(frozen=True, slots=True)
class OutputFolderState:
    """The state of the output folder before a build."""

    state: Literal["new", "ours", "other", "done", "foreign"]
    """``ours``: begun by the same build; ``other``: by another; ``done``: finished by the same; ``foreign``: contains
    files that no build wrote."""
    what: str = ""
    """For ``other`` and ``foreign``: what is different."""


def decide(folder_state: OutputFolderState, out: str, is_overwriting: bool) -> Literal["fresh", "resume", "done"]:
    """What to do with the folder; raises if the user must choose."""
    if folder_state.state == "foreign":
        what = f"the folder '{out}' is not empty: it holds {folder_state.what}"
        raise DataError(what, "Name a new folder: a build never removes what it did not write.")
    if is_overwriting or folder_state.state == "new":
        return "fresh"
    if folder_state.state == "other":
        fix = "Use --overwrite to rebuild, or name another folder."
        raise DataError(f"'{out}' holds another build: {folder_state.what}", fix)
    return "resume" if folder_state.state == "ours" else "done"


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In words, which settings have changed, or that the inputs have."""
    changed = [
        f"{key} was {found.get(key)!r} and is now {wanted.get(key)!r}"
        for key in sorted({*found, *wanted} - {"fingerprint"})
        if found.get(key) != wanted.get(key)
    ]
    return ", ".join(changed) or "its inputs have changed since it began"


@dataclass(frozen=True, slots=True)
class BuildJournal:
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / FOLDER

    def begin(self, spec: BuildSpec) -> None:
        self._publish(_PLAN, build_identity(spec))

    def saved_identity(self) -> dict[str, Any] | None:
        """The identity of the build that was begun here; None if there is none."""
        found: dict[str, Any] | None = self._document(_PLAN)
        return found

    def record_part(self, done: PartDone) -> None:
        failpoint(PART_WRITTEN)
        self._publish(_name(done.index), {"shards": list(done.shards), "tally": done.tally.encode()})
        failpoint(PART_NOTED)

    def finished_part(self, index: int) -> PartDone | None:
        """A finished part; None if it is unfinished, or its document is damaged: then the part is built again."""
        body = self._document(_name(index))
        return None if body is None else PartDone(index, tuple(body["shards"]), PartCounts.decode(body["tally"]))

    def clear(self, *, plan_too: bool) -> None:
        """Remove the documents of parts, which are not needed once the manifest is written; with ``plan_too``, all."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name != _LOCK and (plan_too or path.name != _PLAN):
                path.unlink(missing_ok=True)

    def _publish(self, name: str, body: Any) -> None:
        try:
            LocalStorage(self.folder).publish(name, seal("build", body, _VERSION), replace=True)
        except StorageError as error:
            raise SetupError(str(error).rstrip("."), "Fix that, and run the same command again.") from error

    def _document(self, name: str) -> Any:
        try:
            return unseal("build", read_bytes(self.folder / name), name, _VERSION)
        except (FileNotFoundError, NotADirectoryError, UnsoundDocument):
            return None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process; the lock is released when the process ends, for whatever reason."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            what = f"'{self.out}' cannot be written: {error.strerror}"
            raise SetupError(what, "Name another folder, or fix its permissions.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            what = f"another process is building into '{self.out}'"
            raise SetupError(what, "Let it finish, or name another folder.") from error
        try:
            yield
        finally:
            os.close(handle)


def _name(index: int) -> str:
    return f"part-{index:06d}.json"


def build_identity(spec: BuildSpec) -> dict[str, Any]:
    """The values that distinguish one build from another."""
    seen = fingerprint(spec.input_folders, spec.given_paths)
    return {**spec.settings.as_options(), "inputs": list(spec.given_paths), "fingerprint": seen}

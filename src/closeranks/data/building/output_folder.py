"""Examines the output folder of a build.

Invariant: only files that builds write are ever taken for a build's, or removed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.data.building.build_spec import BuildSpec
from closeranks.data.building.journal import FOLDER, BuildJournal, OutputFolderState, build_identity, differences
from closeranks.data.files.local import LocalFiles
from closeranks.data.shards.manifest import NAME as DATASET
from closeranks.data.shards.manifest import DatasetManifest, read_manifest

_OURS = re.compile(r"shard-\d+(-\d+)?\.crs(\.part|\.lock)?")


def output_folder_state(spec: BuildSpec) -> OutputFolderState:
    out = spec.out
    names = _names(out)
    foreign = sorted(name for name in names if not _is_ours(name))
    if foreign:
        return OutputFolderState("foreign", ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else ""))
    plan = BuildJournal(out).saved_identity()
    if plan is None:
        return (
            OutputFolderState("other", "shards without their build plan")
            if names - {FOLDER}
            else OutputFolderState("new")
        )
    if plan != (wanted := build_identity(spec)):
        return OutputFolderState("other", differences(plan, wanted))
    return OutputFolderState("done" if _is_described(out) else "ours")


def _names(out: Path) -> set[str]:
    try:
        return set(os.listdir(out))
    except FileNotFoundError:
        return set()
    except NotADirectoryError as error:
        raise DataError(f"'{out}' is a file", "Name a folder for the shards.") from error
    except OSError as error:
        raise DataError(f"'{out}' cannot be read: {error.strerror}", "Name another folder.") from error


def _is_ours(name: str) -> bool:
    return name in (FOLDER, DATASET) or _OURS.fullmatch(name) is not None


def _is_described(out: Path) -> bool:
    """Whether a sound manifest exists; a damaged one is written again, from the parts."""
    try:
        read_output_manifest(out)
    except DataError:
        return False
    return True


def read_output_manifest(out: Path) -> DatasetManifest:
    return read_manifest(LocalFiles(out))


def remove_old_build(out: Path) -> None:
    """Remove an earlier build: its manifest first, so that no reader takes a partial data set for a complete one."""
    for name in sorted(_names(out), key=lambda name: name != DATASET):
        if name != FOLDER and _is_ours(name):
            (out / name).unlink()

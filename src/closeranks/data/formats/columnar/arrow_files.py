"""Finds the Arrow files of a dataset in a folder, and their order.

Either those that Hugging Face's ``state.json`` lists (``save_to_disk``), with the row mapping and the columns that it
may specify, or all files with Arrow's suffixes. Invariant: if a folder contains several datasets (the splits of a
``DatasetDict``, or of a cache) none is read: the error lists their names to choose from. Needs no pyarrow until records
are opened, and never ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from closeranks.core.errors import DataError, SetupError
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.record_index.saved_index import IndexLocation

if TYPE_CHECKING:
    from closeranks.data.formats.columnar.arrow_records import ArrowRecords

NAME = "arrow"
SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_MAPPING = "indices.arrow"
"""Where old versions of ``datasets`` put the row order of a shuffled or selected dataset."""


@dataclass(frozen=True, slots=True)
class ArrowFiles:
    """The files to read."""

    data: tuple[FileInfo, ...]
    mapping: tuple[FileInfo, ...] = ()
    """Files whose single column gives the row of the data for each record. None: stored order."""
    columns: tuple[str, ...] = ()
    """None: all columns."""


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.lower().endswith(SUFFIXES) or info.name == _SPLITS for info in infos)


def open_records(files: Files, index: IndexLocation) -> ArrowRecords:
    found = find_arrow_files(files)
    try:
        from closeranks.data.formats.columnar.arrow_records import ArrowRecords
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise SetupError("Arrow needs pyarrow (not installed)", "Run: pip install 'closeranks[data]'") from error
    return ArrowRecords(files, index, found)


def find_arrow_files(files: Files) -> ArrowFiles:
    infos = {info.name: info for info in files.list()}
    _refuse_splits(files, infos)
    if _STATE in infos:
        return _saved_layout(files, infos)
    data = tuple(info for name, info in infos.items() if name.lower().endswith(SUFFIXES))
    if not data:
        raise DataError(f"'{files.url}' holds no {' or '.join(SUFFIXES)} file")
    return ArrowFiles(data)


def _saved_layout(files: Files, infos: dict[str, FileInfo]) -> ArrowFiles:
    full = files.full_name(_STATE)
    state = _document(files, _STATE)
    try:
        data = [entry["filename"] for entry in state["_data_files"]]
        mapping = [entry["filename"] for entry in state.get("_indices_data_files") or ()]
        columns = () if state.get("_output_all_columns") else tuple(state.get("_format_columns") or ())
    except (KeyError, TypeError) as error:
        raise DataError(f"'{full}' does not belong to a Hugging Face dataset: {error!r}") from error
    if not mapping and _MAPPING in infos and _MAPPING not in data:
        mapping = [_MAPPING]
    missing = [name for name in data + mapping if name not in infos]
    if missing:
        raise DataError(f"'{files.full_name(missing[0])}' is missing, which '{full}' names", "Copy the folder again.")
    if not data:
        raise DataError(f"'{full}' names no data files")
    return ArrowFiles(tuple(infos[name] for name in data), tuple(infos[name] for name in mapping), columns)


def _refuse_splits(files: Files, infos: dict[str, FileInfo]) -> None:
    splits: list[str] = []
    advice = "Save the one you want with save_to_disk, and name its folder."
    if _SPLITS in infos:
        splits = sorted(_document(files, _SPLITS).get("splits", []))
    elif _STATE not in infos:
        splits = sorted(name[: -len(_STATE) - 1] for name in infos if name.endswith(f"/{_STATE}"))
    if splits:
        advice = f"Choose one: '{files.full_name(splits[0])}'."
    elif _STATE not in infos and _INFO in infos:
        found = sorted(_document(files, _INFO).get("splits") or {})
        splits = found if len(found) > 1 else []
    if splits:
        which = "several datasets" if len(splits) > 1 else "a dataset in a subfolder"
        raise DataError(f"'{files.url}' holds {which}: {', '.join(splits)}", advice)


def _document(files: Files, name: str) -> dict[str, Any]:
    full = files.full_name(name)
    try:
        document = json.loads(files.read(name))
    except ValueError as error:
        raise DataError(f"'{full}' is damaged: {error}", "Copy it again.") from error
    if not isinstance(document, dict):
        raise DataError(f"'{full}' is damaged: it is not a JSON object", "Copy it again.")
    return document

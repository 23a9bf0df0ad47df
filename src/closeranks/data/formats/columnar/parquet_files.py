"""Finds the Parquet files of a folder, and opens them if pyarrow is installed.

By name, as other readers do: ``.parquet``, ``.pq`` and ``.parq``, without folders and files that begin with ``_`` (a
writer's own metadata). Needs no pyarrow until records are opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from closeranks.core.errors import DataError, SetupError
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.record_index.saved_index import IndexLocation

if TYPE_CHECKING:
    from closeranks.data.formats.columnar.parquet_records import ParquetRecords

NAME = "parquet"
SUFFIXES = (".parquet", ".pq", ".parq")


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(_is_data(info.name) for info in infos)


def open_records(files: Files, index: IndexLocation) -> ParquetRecords:
    infos = [info for info in files.list() if _is_data(info.name)]
    if not infos:
        raise DataError(f"'{files.url}' holds no {' or '.join(SUFFIXES)} file")
    try:
        from closeranks.data.formats.columnar.parquet_records import ParquetRecords
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise SetupError("Parquet needs pyarrow (not installed)", "Run: pip install 'closeranks[data]'") from error
    return ParquetRecords(files, index, infos)


def _is_data(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not any(part.startswith("_") for part in name.split("/"))

"""Reads the records of a compressed tar file sequentially.

By WebDataset's rule, as ``formats.records.webdataset`` reads uncompressed ones: consecutive members whose names agree
up to the first dot of the last path component are one record, and the part after the dot names the field. Invariant:
nothing is extracted to disk and nothing is unpickled; values are the members' bytes.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from closeranks.core.errors import DataError
from closeranks.data.formats.records.tar_members import split_name


@dataclass(slots=True)
class TarRecord:
    """One record."""

    offset: int
    """Offset of its first header in the uncompressed tar."""
    record: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why it cannot be used."""


def read_tar_records(content: BinaryIO, shown: str) -> Iterator[TarRecord]:
    member = TarRecord(0)
    try:
        with tarfile.open(fileobj=content, mode="r|") as archive:
            for info in archive:
                names = split_name(info.name)
                stream = archive.extractfile(info) if names is not None and info.isfile() else None
                if names is None or stream is None:
                    continue
                key, name = names
                if key != member.record.get("__key__"):
                    if member.record:
                        yield member
                    member = TarRecord(info.offset, {"__key__": key})
                if name in member.record:
                    member.reason = f"record '{key}' has two members '{name}'"
                member.record[name] = stream.read()
    except tarfile.TarError as error:
        raise DataError(f"'{shown}' is not a tar archive, or is damaged: {error}", "Fetch it again.") from error
    if member.record:
        yield member

"""Reads compressed shards of MosaicML's MDS.

A shard is decompressed into a folder of its own, with an index that lists it alone, for as long as it is read.
Invariant: each process keeps at most one decompressed shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from closeranks.core.errors import DataError
from closeranks.data.building.readers.decompress import compression_of, open_stream
from closeranks.data.building.temporary_folder import temporary_folder
from closeranks.data.dataset_protocol import Records
from closeranks.data.files.local import LocalFiles
from closeranks.data.files.protocol import Files
from closeranks.data.formats.open import open_records
from closeranks.data.formats.record_index.saved_index import IndexLocation

_INDEX = "index.json"


@contextmanager
def open_compressed_mds(files: Files, name: str) -> Iterator[Records]:
    entry = _entry(files, name)
    shown = files.full_name(name)
    with temporary_folder() as folder:
        raw = folder / PurePosixPath(str(entry["raw_data"]["basename"])).name
        with (
            files.local_path(name) as path,
            open_stream(path, shown, compression_of(name)) as stream,
            open(raw, "wb") as out,
        ):
            shutil.copyfileobj(stream.content, out, 1 << 20)
        alone = {**entry, "compression": None, "zip_data": None}
        (folder / _INDEX).write_text(json.dumps({"version": 2, "shards": [alone]}))
        yield open_records(LocalFiles(folder), "mds", IndexLocation(str(folder)))


def _entry(files: Files, name: str) -> dict[str, Any]:
    """The entry of a shard in the index beside it."""
    index = str(PurePosixPath(name).parent / _INDEX)
    try:
        entries = json.loads(files.read(index))["shards"]
        found = [one for one in entries if one["zip_data"]["basename"] == PurePosixPath(name).name]
        return dict(found[0], raw_data=dict(found[0]["raw_data"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        what = f"'{files.full_name(index)}' does not say what '{name}' is"
        raise DataError(what, "Copy the data set again, with its index.") from error

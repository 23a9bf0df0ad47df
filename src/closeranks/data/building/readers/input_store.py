"""Opens input formats that a build reads in place.

Invariant: their indexes, where they need one, are written to a folder of the build: input folders are not modified.
"""

from __future__ import annotations

from closeranks.core.errors import DataError
from closeranks.data.building.readers.input_files import BuildInput
from closeranks.data.dataset_protocol import Records
from closeranks.data.files.protocol import Files
from closeranks.data.formats.open import open_records
from closeranks.data.formats.record_index.saved_index import IndexLocation


def open_input_store(given: BuildInput, files: Files, index_folder: str) -> Records:
    if given.kind == "megatron":
        fix = "Train on it directly: data.name = 'tokens'."
        raise DataError(f"'{files.url}' already holds token ids", fix)
    return open_records(files, given.kind, IndexLocation(index_folder))

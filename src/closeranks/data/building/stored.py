"""How does a build read formats that are read where they lie?

Invariant: their indexes, where they need one, go into a folder of the build's own: inputs are left as they are.
"""

from __future__ import annotations

from closeranks.core.errors import DataError
from closeranks.data.building.inputs import BuildInput
from closeranks.data.files.protocol import Files
from closeranks.data.formats.index import IndexLocation
from closeranks.data.formats.open import open_records
from closeranks.data.stores import Records


def open_input_store(given: BuildInput, files: Files, index_folder: str) -> Records:
    if given.kind == "megatron":
        fix = "Train on it where it lies: data.name = 'tokens'."
        raise DataError(f"'{files.url}' holds token ids already", fix)
    return open_records(files, given.kind, IndexLocation(index_folder))

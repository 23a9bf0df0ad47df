"""Seals and unseals the documents of a checkpoint, with its format version and error messages.

The sealing itself is in ``storage.documents``. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from closeranks.core.errors import CheckpointError
from closeranks.storage import documents
from closeranks.storage.documents import UnsoundDocument

VERSION = 1
"""Format version of everything in a checkpoint: a reader refuses later versions and reads every earlier one."""


def seal(kind: str, body: Any) -> bytes:
    """``kind`` is one lower-case word; ``body`` plain values, without NaN or infinity (``float.hex`` keeps those)."""
    return documents.seal(kind, body, VERSION)


def unseal(kind: str, data: bytes, name: str) -> Any:
    """The body, or a ``CheckpointError`` that calls the document ``name``."""
    try:
        return documents.unseal(kind, data, name, VERSION)
    except UnsoundDocument as error:
        fix = "Update closeranks." if error.is_newer else "Use an earlier checkpoint."
        raise CheckpointError(str(error), fix) from error

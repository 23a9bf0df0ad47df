"""How is a small document written so that no damage to it passes unseen?

One line says what it is and the BLAKE3 of the rest; the rest is JSON. Invariant: every byte of a sealed document
counts: a flipped bit anywhere, in the first line too, is refused, and so is a document of another kind or version.
Imports no torch.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from closeranks.core.errors import CheckpointError

VERSION = 1
"""Of everything a checkpoint holds: a reader refuses a later one by name and reads every earlier one."""


def seal(kind: str, body: Any) -> bytes:
    """``kind`` is one lower-case word; ``body`` plain values, without NaN or infinity (``float.hex`` keeps those)."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return _first_line(kind, VERSION, blake3(text).hexdigest()) + text


def unseal(kind: str, data: bytes, name: str) -> Any:
    """The body, or a ``CheckpointError`` that calls the document ``name``."""
    line, newline, text = data.partition(b"\n")
    try:
        first = json.loads(line)
        version, digest = int(first["version"]), str(first["blake3"])
        is_ours = first["closeranks"] == kind
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged, or not of this program", "Use an earlier checkpoint.") from error
    if not is_ours or line + newline != _first_line(kind, version, digest):
        raise CheckpointError(f"{name} is damaged, or not of this program", "Use an earlier checkpoint.")
    if blake3(text).hexdigest() != digest:
        raise CheckpointError(f"{name} is damaged: it does not match its digest", "Use an earlier checkpoint.")
    if version < 1:
        raise CheckpointError(f"{name} has format version {version}, which never was", "Use an earlier checkpoint.")
    if version > VERSION:
        what = f"{name} has format version {version}, and this program reads up to {VERSION}"
        raise CheckpointError(what, "Update closeranks.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # sealed by a broken or hostile writer
        raise CheckpointError(f"{name} is damaged: it holds no JSON", "Use an earlier checkpoint.") from error


def _first_line(kind: str, version: int, digest: str) -> bytes:
    return f'{{"closeranks":"{kind}","version":{version},"blake3":"{digest}"}}\n'.encode()

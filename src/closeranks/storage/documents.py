"""How is a small document written so that no damage to it passes unseen?

One line says what it is and the BLAKE3 of the rest; the rest is JSON. Invariant: every byte of a sealed document
counts: a flipped bit anywhere, in the first line too, is refused, and so is a document of another kind or version.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3


class UnsoundDocument(Exception):
    """A document that is not what it should be; ``str`` is one sentence without its end."""

    is_newer = False
    """Whether a later program would read it."""


def seal(kind: str, body: Any, version: int) -> bytes:
    """``kind`` is one lower-case word; ``body`` plain values, without NaN or infinity (``float.hex`` keeps those)."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return _first_line(kind, version, blake3(text).hexdigest()) + text


def unseal(kind: str, data: bytes, name: str, version: int) -> Any:
    """The body, or ``UnsoundDocument`` that calls the document ``name``; versions up to ``version`` are read."""
    line, newline, text = data.partition(b"\n")
    try:
        first = json.loads(line)
        found, digest = int(first["version"]), str(first["blake3"])
        is_ours = first["closeranks"] == kind
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsoundDocument(f"{name} is damaged, or not of this program") from error
    if not is_ours or line + newline != _first_line(kind, found, digest):
        raise UnsoundDocument(f"{name} is damaged, or not of this program")
    if blake3(text).hexdigest() != digest:
        raise UnsoundDocument(f"{name} is damaged: it does not match its digest")
    if found < 1:
        raise UnsoundDocument(f"{name} has format version {found}, which never was")
    if found > version:
        newer = UnsoundDocument(f"{name} has format version {found}, and this program reads up to {version}")
        newer.is_newer = True
        raise newer
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # sealed by a broken or hostile writer
        raise UnsoundDocument(f"{name} is damaged: it holds no JSON") from error


def _first_line(kind: str, version: int, digest: str) -> bytes:
    return f'{{"closeranks":"{kind}","version":{version},"blake3":"{digest}"}}\n'.encode()

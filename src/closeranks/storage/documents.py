"""Seals small documents with a digest, so that no damage to them goes unnoticed.

The first line holds the kind and the BLAKE3 digest of the rest; the rest is JSON. Invariant: every byte of a sealed
document is covered: a flipped bit anywhere, the first line included, is refused, and so is a document of another kind
or version.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, NoReturn

from blake3 import blake3

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class UnsoundDocument(Exception):
    """A document that is damaged or of the wrong kind; ``str`` is one sentence without its full stop."""

    is_newer = False
    """Whether a newer version of the program would read it."""


def seal(kind: str, body: Any, version: int) -> bytes:
    """``kind`` is one lower-case word; ``body`` plain values, without NaN or infinity (``float.hex`` keeps those)."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return _first_line(kind, version, blake3(text).hexdigest()) + text


def unseal(kind: str, data: bytes, name: str, version: int) -> Any:
    """The body, or ``UnsoundDocument`` that refers to the document as ``name``; versions up to ``version`` are read."""
    line, newline, text = data.partition(b"\n")
    try:
        first = json.loads(line)
        found, digest = int(first["version"]), str(first["blake3"])
        is_ours = first["closeranks"] == kind
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsoundDocument(f"{name} is damaged, or not written by closeranks") from error
    if not is_ours or line + newline != _first_line(kind, found, digest):
        raise UnsoundDocument(f"{name} is damaged, or not written by closeranks")
    if blake3(text).hexdigest() != digest:
        raise UnsoundDocument(f"{name} is damaged: it does not match its digest")
    if found < 1:
        raise UnsoundDocument(f"{name} has format version {found}, which never existed")
    if found > version:
        newer = UnsoundDocument(f"{name} has format version {found}, and this program reads up to {version}")
        newer.is_newer = True
        raise newer
    try:
        return parse_plain(text)
    except (ValueError, RecursionError) as error:  # sealed by a broken or hostile writer
        raise UnsoundDocument(f"{name} is damaged: it is not JSON") from error


def parse_plain(text: bytes) -> Any:
    """JSON as ``seal`` writes it. ``ValueError``: a duplicate key, a number that is not finite, a string that is not
    Unicode text (a lone surrogate), or not JSON at all."""
    found = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)
    if _SURROGATE.search(text):  # a quick test for an escaped surrogate first: documents may have millions of values
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _first_line(kind: str, version: int, digest: str) -> bytes:
    return f'{{"closeranks":"{kind}","version":{version},"blake3":"{digest}"}}\n'.encode()

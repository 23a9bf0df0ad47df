"""Describes JSON parse errors in words.

Invariant: a position counts characters of the record itself, never lines of a file that does not exist.
"""

from __future__ import annotations

import json


def json_error(error: Exception) -> str:
    """Completes "not JSON: ..."; ``error`` is what ``json.loads`` raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos} of the record"
    return str(error)

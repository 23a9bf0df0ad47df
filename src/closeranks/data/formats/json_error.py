"""Why is a piece of text no JSON, in words?

Invariant: a position counts characters of the record it is about, never lines of a file that nobody has.
"""

from __future__ import annotations

import json


def json_error(error: Exception) -> str:
    """Completes "not JSON: ..."; ``error`` is what ``json.loads`` raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos} of the record"
    return str(error)

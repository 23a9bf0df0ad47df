"""Makes text that came from a file safe to print on a terminal.

Invariant: what ``printable`` returns can be encoded as UTF-8 and moves no cursor, changes no colour and reorders no
text: control characters, lone surrogates and directional overrides appear as escapes. Newlines and tabs stay.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_printable(text: str) -> bool:
    """Whether a name can be shown unchanged, on one line."""
    return not _UNSAFE.search(text) and "\n" not in text and "\t" not in text

"""Reads a secret that processes share, from text or from a file, and refuses one that can be guessed.

Invariant: no error and no note quotes the secret.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from closeranks.core.errors import SetupError
from closeranks.core.system.regular_file import open_binary

_FEWEST_CHARACTERS = 32
_FEWEST_DIFFERENT = 8
"""Rejects long tokens of a repeated character; 32 random hex digits have fewer than this once in 10^11 draws."""
_MOST_BYTES = 4096


class SecretKind(NamedTuple):
    """What a secret is called in errors, and how to make one."""

    name: str
    fix: str


def parse_secret(text: str, source: str, kind: SecretKind) -> bytes:
    """The secret in the text that ``source`` gave; surrounding white space, such as an editor's last newline, is
    ignored."""
    words = text.split()
    if not words:
        raise SetupError(f"{source} holds no {kind.name}", kind.fix)
    if len(words) > 1 or not (words[0].isascii() and words[0].isprintable()):
        raise SetupError(f"{source} holds more than one word, or characters that a token cannot have", kind.fix)
    if len(words[0]) < _FEWEST_CHARACTERS:
        what = f"the {kind.name} in {source} is too short ({len(words[0])} characters, at least {_FEWEST_CHARACTERS})"
        raise SetupError(what, kind.fix)
    if len(set(words[0])) < _FEWEST_DIFFERENT:
        raise SetupError(f"the {kind.name} in {source} can be guessed (too few different characters)", kind.fix)
    return words[0].encode()


def read_secret(path: Path, kind: SecretKind, on_note: Callable[[str], None]) -> bytes:
    """The secret in a file; a file that others may read or write is accepted with a warning."""
    try:
        with open_binary(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SetupError(f"the token file {path} cannot be read ({error.strerror})", kind.fix) from None
    if len(data) > _MOST_BYTES:
        raise SetupError(f"the token file {path} is larger than {_MOST_BYTES} bytes: not a token", kind.fix)
    secret = parse_secret(data.decode("latin-1"), f"the token file {path}", kind)
    if mode & 0o077:
        on_note(f"The token file {path} can be used by others on this host (mode {mode:o}): chmod 600 it.")
    return secret

"""Which secret do the agents of one job share, and where does it lie?

Order: ``--token-file``, then ``CLOSERANKS_TOKEN``, and the lead draws one itself when neither was given. Invariant: the
secret is in nobody's words: its ``repr`` shows a fingerprint, no error quotes it, and no command line carries it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.core.errors import SetupError
from closeranks.core.regular_file import open_binary

NUM_RANDOM_BYTES = 32
_FEWEST_CHARACTERS = 32
_FEWEST_DIFFERENT = 8
"""A repeated character is long but no secret; 32 random hex digits have fewer than this once in 10^11 draws."""
_MOST_BYTES = 4096
_HOW = "Make one with `openssl rand -hex 32`, in a file of mode 600 that each host is given with --token-file."


@dataclass(frozen=True, slots=True)
class Token:
    """The job's secret. Compare two by their fingerprints, which may be shown."""

    secret: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return hmac.new(self.secret, b"closeranks token fingerprint", hashlib.sha256).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"Token({self.fingerprint})"


def parse_token(text: str, source: str) -> Token:
    """The token in what ``source`` gave; white space around it, as an editor's last newline, does not count."""
    words = text.split()
    if not words:
        raise SetupError(f"{source} holds no job token", _HOW)
    if len(words) > 1 or not (words[0].isascii() and words[0].isprintable()):
        raise SetupError(f"{source} holds more than one word, or other signs than a token has", _HOW)
    if len(words[0]) < _FEWEST_CHARACTERS:
        what = f"the job token in {source} is too short ({len(words[0])} characters, at least {_FEWEST_CHARACTERS})"
        raise SetupError(what, _HOW)
    if len(set(words[0])) < _FEWEST_DIFFERENT:
        raise SetupError(f"the job token in {source} can be guessed (too few different characters)", _HOW)
    return Token(words[0].encode())


def read_token(path: Path, on_note: Callable[[str], None]) -> Token:
    """The token in a file; one that others may read or write is used, with a warning."""
    try:
        with open_binary(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SetupError(f"the token file {path} cannot be read ({error.strerror})", _HOW) from None
    if len(data) > _MOST_BYTES:
        raise SetupError(f"the token file {path} is larger than {_MOST_BYTES} bytes: not a token", _HOW)
    token = parse_token(data.decode("latin-1"), f"the token file {path}")
    if mode & 0o077:
        on_note(f"The token file {path} can be used by others on this host (mode {mode:o}): chmod 600 it.")
    return token


def draw_token(path: Path) -> Token:
    """A fresh token, written to ``path`` for its owner alone. Whoever reads finds the old file or the new one, whole.

    A temporary file is of mode 600 from the start, whatever the umask: there is no moment at which others can read.
    """
    text = secrets.token_hex(NUM_RANDOM_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{text}\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        fix = "Give a token of your own with --token-file, or make the folder writable."
        raise SetupError(f"the job token cannot be written to {path} ({error.strerror})", fix) from None
    return Token(text.encode())


def given_token(token_file: Path | None, from_shell: str, on_note: Callable[[str], None]) -> Token | None:
    """The token that a person gave, if one did. ``from_shell``: ``core.environment.job_token()``."""
    if token_file is not None:
        return read_token(token_file, on_note)
    return parse_token(from_shell, "CLOSERANKS_TOKEN") if from_shell else None


def lead_token(token_file: Path | None, from_shell: str, draw_at: Path, on_note: Callable[[str], None]) -> Token:
    """The lead's: the one given, or one drawn and written to ``draw_at``."""
    return given_token(token_file, from_shell, on_note) or draw_token(draw_at)


def host_token(token_file: Path | None, from_shell: str, on_note: Callable[[str], None]) -> Token:
    """A joining host's: it must have been given."""
    token = given_token(token_file, from_shell, on_note)
    if token is None:
        fix = "Copy the lead's token file here and pass --token-file, or set CLOSERANKS_TOKEN."
        raise SetupError("joining a job takes its token, and none was given", fix)
    return token

"""The secret that the agents of one job share: where it comes from, and how it is checked and written.

Order: ``--token-file``, then ``CLOSERANKS_TOKEN``; the leader generates one when neither was given. Invariant: the
secret is never printed: its ``repr`` shows a fingerprint, no error quotes it, and no command line carries it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.core.errors import SetupError
from closeranks.core.system.secret_token import SecretKind, parse_secret, read_secret

NUM_RANDOM_BYTES = 32
_KIND = SecretKind(
    "job token",
    "Make one with `openssl rand -hex 32`, in a file of mode 600, and pass it to each host with --token-file.",
)


@dataclass(frozen=True, slots=True)
class JobToken:
    """The job's secret. Its fingerprint may be shown, and tells two tokens apart."""

    secret: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return hmac.new(self.secret, b"closeranks token fingerprint", hashlib.sha256).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"JobToken({self.fingerprint})"


def parse_token(text: str, source: str) -> JobToken:
    """Parse the text that ``source`` gave; surrounding white space, such as an editor's last newline, is ignored."""
    return JobToken(parse_secret(text, source, _KIND))


def read_token(path: Path, on_note: Callable[[str], None]) -> JobToken:
    """Read the token from a file; a file that others may read or write is accepted with a warning."""
    return JobToken(read_secret(path, _KIND, on_note))


def generate_token(path: Path) -> JobToken:
    """Generate a token and write it to ``path``, readable by its owner only. The file is replaced atomically.

    The temporary file has mode 600 from the start, whatever the umask: there is no moment at which others can read it.
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
    return JobToken(text.encode())


def given_token(token_file: Path | None, from_shell: str, on_note: Callable[[str], None]) -> JobToken | None:
    """The token that the user gave, or None. ``from_shell``: ``core.system.environment.job_token()``."""
    if token_file is not None:
        return read_token(token_file, on_note)
    return parse_token(from_shell, "CLOSERANKS_TOKEN") if from_shell else None


def leader_token(token_file: Path | None, from_shell: str, new_file: Path, on_note: Callable[[str], None]) -> JobToken:
    """The leader's token: the one given, or a new one that is written to ``new_file``."""
    return given_token(token_file, from_shell, on_note) or generate_token(new_file)


def host_token(token_file: Path | None, from_shell: str, on_note: Callable[[str], None]) -> JobToken:
    """The token of a host that joins; one must have been given."""
    token = given_token(token_file, from_shell, on_note)
    if token is None:
        fix = "Copy the leader's token file here and pass --token-file, or set CLOSERANKS_TOKEN."
        raise SetupError("joining a job requires its token, and none was given", fix)
    return token

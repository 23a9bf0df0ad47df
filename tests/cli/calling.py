"""Verbs of ``closeranks`` as a person calls them, in this process: through the front door, which turns errors into
sentences and exit codes."""

from __future__ import annotations

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from closeranks.cli.main import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def call(*words: object, cwd: Path | None = None) -> Said:
    """``cwd``: the working folder meanwhile."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    called = ["closeranks", *map(str, words)]
    with chdir(cwd or "."), redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", called):
        try:
            main()
        except SystemExit as leave:
            code = int(leave.code or 0)
    return Said(code, out.getvalue(), err.getvalue())

"""Verbs of ``closeranks`` as a person calls them, in this process: through the front door, which turns errors into
sentences and exit codes."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from closeranks.cli.main import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def call(group: str, *words: object) -> Said:
    out, err, code = io.StringIO(), io.StringIO(), 0
    called = ["closeranks", group, *map(str, words)]
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", called):
        try:
            main()
        except SystemExit as leave:
            code = int(leave.code or 0)
    return Said(code, out.getvalue(), err.getvalue())

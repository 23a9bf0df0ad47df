"""Verbs of ``closeranks ckpt`` as a person calls them, within this process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import ModuleType

import typer

from closeranks.cli.ckpt import diff, ls, show, verify
from closeranks.core.errors import CloseranksError

VERBS: tuple[ModuleType, ...] = (ls, show, verify, diff)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def ckpt(*arguments: object) -> Said:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    for verb in VERBS:
        verb.register(app)
    code = 0
    with _captured() as (out, err):
        try:
            app([str(argument) for argument in arguments], standalone_mode=True)
        except SystemExit as leave:
            code = int(leave.code or 0)
        except CloseranksError as error:
            code = error.exit_code
            print(f"closeranks: {error}", file=err)
    return Said(code, out.getvalue(), err.getvalue())


@contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err

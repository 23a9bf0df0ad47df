"""Prints text that may contain names and values from untrusted files.

Invariant: no byte of such text reaches the terminal as a control sequence (``core.printable``).
"""

from __future__ import annotations

import typer

from closeranks.core.printable import printable


def safe_echo(text: object, *, err: bool = False) -> None:
    """``typer.echo`` with control characters escaped."""
    typer.echo(printable(str(text)), err=err)

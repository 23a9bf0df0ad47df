"""Tables of plain text on a terminal or in a pipe.

Imports no torch. Invariant: standard output holds the listing and nothing else, so that ``--json`` can be piped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from closeranks.core.printable import printable

_WIDE = 200


class SafeConsole(Console):
    """A console whose plain strings are made safe to print; styles come from ``rich.text.Text`` objects."""

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **settings)


def stdout() -> Console:
    """Names hold brackets and numbers: nothing in them is markup. A pipe gets whole lines."""
    console = SafeConsole(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else SafeConsole(markup=False, highlight=False, emoji=False, width=_WIDE)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    droppable: Sequence[str] = (),
) -> None:
    """No cell is ever cut. If the terminal is too narrow, columns are left out in the order of ``droppable``, and a
    line below the table names them."""
    console = stdout()
    rows = [[printable(cell) for cell in row] for row in rows]
    lines, left_out = align_columns(headings, rows, right, droppable, console.width if console.is_terminal else None)
    for number, line in enumerate(lines):
        console.print(Text(line, style="" if number else "bold"), soft_wrap=True)
    if left_out:
        console.print(f"(a wider terminal shows {', '.join(left_out)})", soft_wrap=True)


def align_columns(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    droppable: Sequence[str],
    width: int | None,
) -> tuple[list[str], list[str]]:
    """The lines of a table, and the headings of what was left out of them so that they fit."""
    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    shown, left_out = list(range(len(headings))), []
    for heading in droppable:
        if width is None or sum(widths[n] for n in shown) + 2 * (len(shown) - 1) <= width:
            break
        if heading in headings:
            shown.remove(list(headings).index(heading))
            left_out.append(heading)

    def padded(cells: Sequence[str], n: int) -> str:
        space = " " * (widths[n] - cell_len(cells[n]))
        return space + cells[n] if headings[n] in right else cells[n] + space

    return ["  ".join(padded(cells, n) for n in shown).rstrip() for cells in (headings, *rows)], left_out


def size(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(str(extent) for extent in shape) or "number"

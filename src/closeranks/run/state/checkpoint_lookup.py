"""Which checkpoints does a person mean by a place, and how are they put on a terminal?

Imports no torch. Invariant: standard output holds the listing and nothing else, so that ``--json`` can be piped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from closeranks.checkpoint.format.manifest import CheckpointManifest
from closeranks.checkpoint.load.catalogue import Catalogue, FoundCheckpoint, find_checkpoints
from closeranks.core.errors import CheckpointError
from closeranks.core.printable import printable
from closeranks.telemetry.run_log.run_folder import RunFolder

_WIDE = 200
_PLACES = "Name a run folder, its checkpoints folder, one checkpoint in it, or a URL of those."


def require_checkpoints(place: str) -> Catalogue:
    """All that lies there; nothing at all is a mistake in the place."""
    if not place.strip():
        raise CheckpointError("the path is empty", _PLACES)
    catalogue = find_checkpoints(place)
    if not catalogue.found:
        odd = "".join(f" ({odd.what})" for odd in catalogue.problems if odd.is_damage)
        raise CheckpointError(f"{_nothing(place)}{odd}", _PLACES)
    return catalogue


def _nothing(place: str) -> str:
    """What there is instead of checkpoints; a URL is not asked again."""
    if "://" not in place and not Path(place).expanduser().exists():
        return f"there is nothing at {place}"
    if "://" not in place and RunFolder(Path(place).expanduser()).metrics(0).is_file():
        return f"the run {place} has no checkpoints (checkpoint.save was off, or it ended before the first)"
    return f"there are no checkpoints at {place}"


def pick_checkpoint(place: str) -> tuple[FoundCheckpoint, CheckpointManifest]:
    """The one checkpoint that is named, or the sound one that a resumed run would try first."""
    catalogue = require_checkpoints(place)
    for found in catalogue.candidates():
        if found.manifest is not None:
            return found, found.manifest
    first = catalogue.found[0]
    what = first.problem if first.path in first.problem else f"{first.path}: {first.problem}"
    raise CheckpointError(what, "Name another checkpoint of the run.")


def matches_patterns(name: tuple[str, str], patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names the tensor, with its section or without; no pattern names all."""
    full = "/".join(name)
    return not patterns or any(fnmatchcase(full, pattern) or fnmatchcase(name[1], pattern) for pattern in patterns)


def natural_sort_key(name: tuple[str, str]) -> tuple[str, list[tuple[int, str]]]:
    """To sort tensors by: ranks save their shares in an order of their own, and layer 10 comes after layer 9."""
    section, key = name
    return section, [(int(word or 0), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", key)]


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
    spare: Sequence[str] = (),
) -> None:
    """No cell is ever cut. Where a terminal is too narrow, columns go in the order of ``spare``, and that is said."""
    console = stdout()
    rows = [[printable(cell) for cell in row] for row in rows]
    lines, left_out = align_columns(headings, rows, right, spare, console.width if console.is_terminal else None)
    for number, line in enumerate(lines):
        console.print(Text(line, style="" if number else "bold"), soft_wrap=True)
    if left_out:
        console.print(f"(a wider terminal shows {', '.join(left_out)})", soft_wrap=True)


def align_columns(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    spare: Sequence[str],
    width: int | None,
) -> tuple[list[str], list[str]]:
    """The lines of a table, and the headings of what was left out of them so that they fit."""
    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    shown, left_out = list(range(len(headings))), []
    for heading in spare:
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

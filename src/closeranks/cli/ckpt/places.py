"""Which checkpoints does a person mean by a place, and how are they put on a terminal?

Imports no torch. Invariant: standard output holds the listing and nothing else, so that ``--json`` can be piped.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rich.console import Console
from rich.table import Table

from closeranks.checkpoint.catalogue import Catalogue, Found, find
from closeranks.checkpoint.manifest import Manifest
from closeranks.core.errors import CheckpointError

_WIDE = 200


def look(place: str) -> Catalogue:
    """All that lies there; nothing at all is a mistake in the place."""
    catalogue = find(place)
    if not catalogue.found:
        odd = "".join(f" ({text})" for text in catalogue.problems)
        raise CheckpointError(
            f"there are no checkpoints at {place}{odd}",
            "Name a run folder, its checkpoints folder, one checkpoint in it, or a URL of those.",
        )
    return catalogue


def pick(place: str) -> tuple[Found, Manifest]:
    """The one checkpoint that is named, or the sound one that a resumed run would try first."""
    catalogue = look(place)
    for found in catalogue.candidates():
        if found.manifest is not None:
            return found, found.manifest
    first = catalogue.found[0]
    raise CheckpointError(f"{first.path}: {first.problem}", "Name another checkpoint of the run.")


def matches(name: tuple[str, str], patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names the tensor, with its section or without; no pattern names all."""
    full = "/".join(name)
    return not patterns or any(fnmatchcase(full, pattern) or fnmatchcase(name[1], pattern) for pattern in patterns)


def stdout() -> Console:
    """Names hold brackets and numbers: nothing in them is markup. A pipe gets whole lines."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDE)


def plain_table(*headings: str, right: frozenset[str] = frozenset()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(
            heading, justify="right" if heading in right else "left", no_wrap=heading != "state", overflow="fold"
        )
    return table


def size(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(str(extent) for extent in shape) or "number"

"""What is every value of a loaded job, where does it come from, and what does it mean?

Invariant: every leaf of the job is explained, in the order of its fields. The command line renders it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from closeranks.core.config.leaves import leaves
from closeranks.core.config.load import Loaded
from closeranks.core.config.origin import DEFAULT, Origin
from closeranks.core.config.table import Table
from closeranks.core.config.toml import format_value
from closeranks.core.errors import UserError

UNSET = "(not set)"


@dataclass(frozen=True, slots=True)
class ExplainLine:
    key: str
    value: str
    """As TOML, or ``(not set)`` for None, which TOML cannot say."""
    origin: Origin
    help: str


def explain(loaded: Loaded[Any]) -> list[ExplainLine]:
    """One line for each value of the job."""
    job: Table = loaded.value
    return [
        ExplainLine(
            leaf.place,
            _shown(leaf.value),
            loaded.origins.get(leaf.place, DEFAULT),
            " ".join(leaf.help.replace("``", "'").split()),
        )
        for leaf in leaves(job)
    ]


def _shown(value: Any) -> str:
    """What only Python can hold is shown as Python writes it."""
    if value is None:
        return UNSET
    try:
        return format_value(value)
    except UserError:
        return repr(value)

"""Lists every value of a loaded job with its origin and its help text (``closeranks config --explain``).

Invariant: every leaf of the job is listed, in the order of its fields. The command line only renders the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from closeranks.core.config.load import LoadedConfig
from closeranks.core.config.origin import DEFAULT, ValueOrigin
from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import format_value
from closeranks.core.config.values import config_values
from closeranks.core.errors import UserError

UNSET = "(not set)"


@dataclass(frozen=True, slots=True)
class ExplainLine:
    key: str
    value: str
    """As TOML, or ``(not set)`` for None, which TOML cannot express."""
    origin: ValueOrigin
    help: str


def explain(loaded: LoadedConfig[Any]) -> list[ExplainLine]:
    """One line for each value of the job."""
    job: ConfigTable = loaded.value
    return [
        ExplainLine(
            leaf.place,
            _shown(leaf.value),
            loaded.origins.get(leaf.place, DEFAULT),
            " ".join(leaf.help.replace("``", "'").split()),
        )
        for leaf in config_values(job)
    ]


def _shown(value: Any) -> str:
    """A value that TOML cannot express is shown as its Python ``repr``."""
    if value is None:
        return UNSET
    try:
        return format_value(value)
    except UserError:
        return repr(value)

"""Flattens a table into its single values.

Invariant: every value of a table belongs to exactly one leaf, in the order of the fields; an array of plain values is
one leaf, an array of tables is several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import Parts, dotted_key


@dataclass(frozen=True, slots=True)
class ConfigValue:
    parts: Parts
    value: Any
    help: str = ""

    @property
    def place(self) -> str:
        return dotted_key(self.parts)


def config_values(value: Any, parts: Parts = (), help: str = "") -> Iterator[ConfigValue]:
    """Every leaf under a value with its place and the docstring of its field; an empty table is a leaf itself."""
    children = list(_children(value, help))
    if not children:
        yield ConfigValue(parts, value, help)
    for key, child, text in children:
        yield from config_values(child, (*parts, key), text)


def _children(value: Any, help: str) -> Iterator[tuple[str | int, Any, str]]:
    if isinstance(value, ConfigTable):
        for name, field in type(value).model_fields.items():
            yield name, getattr(value, name), cleandoc(field.description or "")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield str(key), child, help
    elif isinstance(value, list | tuple) and value and all(isinstance(item, ConfigTable | Mapping) for item in value):
        for index, item in enumerate(value):
            yield index, item, help

"""The base class of every config model: one table of a job file.

Invariant: an unknown key is a problem, never ignored; a value is never silently converted to another type (the text "5"
is not the number 5, ``true`` is not 1); no text contains a character that a path or a terminal cannot hold; a loaded
table is immutable.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema

_SCALARS = ("bool", "int", "float", "str")
_NOT_SCHEMAS = ("default", "metadata", "serialization")
"""Entries of a core schema that hold values of the user, not further schemas."""


def _refuse_conversions(node: Any) -> None:
    """Make every scalar inside a core schema strict.

    Pydantic's own strict mode would also refuse a list for a tuple and a dict for a table, which is all TOML has.
    """
    if isinstance(node, dict):
        if node.get("type") in _SCALARS:
            node["strict"] = True
        for key, child in node.items():
            if key not in _NOT_SCHEMAS:
                _refuse_conversions(child)
    elif isinstance(node, list | tuple):
        for child in node:
            _refuse_conversions(child)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""All control characters but the tab and the newline."""


def _check_text(value: Any) -> None:
    """Does not look into the user's own tables, such as a model's arguments."""
    if isinstance(value, str) and (found := _CONTROLS.search(value)):
        name = "a NUL" if found[0] == "\0" else f"the control character {found[0]!r}"
        raise ValueError(f"it holds {name}, which paths and names cannot contain. Remove it")
    if isinstance(value, tuple):
        for child in value:
            _check_text(child)


class ConfigTable(BaseModel):
    """One table of the job. The docstring under each field is its help in ``--explain`` and in the JSON Schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _refuse_conversions(schema)
        return schema

    @field_validator("*")
    @classmethod
    def _has_plain_text(cls, value: Any) -> Any:
        _check_text(value)
        return value

"""Builds the JSON Schema with which an editor completes and checks a job file.

Invariant: every job that loads is valid under the schema. TOML has no null and no NaN in JSON's sense, so neither
appears in it.
"""

from __future__ import annotations

import math
from typing import Any

from closeranks.core.config.table import ConfigTable

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INEXPRESSIBLE = object()

Node = dict[str, Any]


def json_schema(model: type[ConfigTable]) -> Node:
    """A schema in the 2020-12 dialect for the whole job file."""
    schema = _cleaned(model.model_json_schema(mode="validation"))
    definitions: Node = schema.get("$defs", {})
    for node in (schema, *definitions.values()):
        for name, child in node.get("properties", {}).items():
            node["properties"][name] = _with_sane_union(child, definitions)
    return {"$schema": _DIALECT, "title": model.__name__, **schema}


def _cleaned(node: Node, *, is_named: bool = True) -> Node:
    """The schema without null, defaults that JSON or TOML cannot express, and titles that only repeat the key."""
    kept = {
        key: value for key, value in node.items() if key not in ("title", "default") or (key == "title" and is_named)
    }
    cleaned = {key: _cleaned_part(key, value) for key, value in kept.items()}
    default = _expressible(node.get("default", _INEXPRESSIBLE))
    if default is not _INEXPRESSIBLE:
        cleaned["default"] = default
    members = [member for member in cleaned.get("anyOf", []) if member != {"type": "null"}]
    if len(members) == 1:
        del cleaned["anyOf"]
        return {**members[0], **cleaned}
    return {**cleaned, "anyOf": members} if members else cleaned


def _cleaned_part(key: str, value: Any) -> Any:
    if key in ("properties", "$defs"):
        return {name: _cleaned(child, is_named=key == "$defs") for name, child in value.items()}
    if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [_cleaned(child, is_named=False) for child in value]
    if key in ("items", "additionalProperties") and isinstance(value, dict):
        return _cleaned(value, is_named=False)
    return value


def _expressible(value: Any) -> Any:
    """A default that both JSON and TOML can express; None inside a table is left out."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _INEXPRESSIBLE
    if isinstance(value, dict):
        pairs = {key: _expressible(child) for key, child in value.items()}
        return {key: child for key, child in pairs.items() if child is not _INEXPRESSIBLE}
    if isinstance(value, list):
        elements = [_expressible(child) for child in value]
        return elements if all(element is not _INEXPRESSIBLE for element in elements) else _INEXPRESSIBLE
    return value


def _with_sane_union(node: Node, definitions: Node) -> Node:
    """A union of tables, discriminated by the key that most of them pin to a constant.

    ``oneOf`` would reject a job that matches both an open member (any ``name``) and a pinned one. In the ``anyOf`` that
    replaces it, the open member excludes the pinned names, and only the default kind may omit its name.
    """
    if "oneOf" not in node:
        return node
    members = [
        definitions.get(str(member.get("$ref", "")).removeprefix("#/$defs/"), member) for member in node["oneOf"]
    ]
    key = next(
        (name for member in members for name, child in member.get("properties", {}).items() if "const" in child), ""
    )
    pinned = [member["properties"][key].get("const") for member in members] if key else []
    rest = {name: value for name, value in node.items() if name not in ("oneOf", "discriminator")}
    default = node.get("default", {}).get(key)
    discriminated = [
        {**reference, **_discriminated(key, constant, pinned, default)}
        for reference, constant in zip(node["oneOf"], pinned, strict=False)
    ]
    return {**rest, "anyOf": discriminated or node["oneOf"]}


def _discriminated(key: str, constant: str | None, pinned: list[str | None], default: str | None) -> Node:
    if constant is None:
        taken = [name for name in pinned if name is not None]
        return {"properties": {key: {"not": {"enum": taken}}}, "required": [key]}
    return {"required": [key]} if default is not None and constant != default else {}

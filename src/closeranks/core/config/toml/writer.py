"""Writes a resolved job as TOML.

The standard library reads TOML but does not write it; tomlkit does, and is imported only when something is written.
Invariant: what ``dump_toml`` writes loads back equal; a value that TOML cannot hold is a ``UserError`` that names its
place, never a silent change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date, time
from pathlib import PurePath
from typing import Any

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import UserError

Parts = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which are not characters."""


def dotted_key(parts: Iterable[str | int]) -> str:
    """The name of a place: ``optim.groups.0.pattern``; a key that is not bare is quoted."""
    return ".".join(_key(str(part)) for part in parts)


def format_value(value: Any) -> str:
    """One value as the right side of ``key = value``; tables are written inline."""
    from tomlkit import inline_table

    written = inline_table().append("value", _plain(value, ())).as_string()
    return written.removeprefix("{value = ").removesuffix("}")


def dump_toml(value: ConfigTable) -> str:
    """The whole table, defaults included, as the text of a job file."""
    from tomlkit import dumps

    return dumps(_plain(value, ()))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_value(key)


def _plain(value: Any, parts: Parts) -> Any:
    """An equivalent value that tomlkit can write."""
    if isinstance(value, ConfigTable):
        return {key: _plain(part, (*parts, key)) for key, part in _written_fields(value)}
    if isinstance(value, Mapping):
        return {_plain(str(key), parts): _plain(part, (*parts, str(key))) for key, part in value.items()}
    if isinstance(value, list | tuple):
        is_tables = all(isinstance(part, ConfigTable | Mapping) for part in value)
        return [_plain(part, (*parts, place) if is_tables else parts) for place, part in enumerate(value)]
    if isinstance(value, PurePath):
        return _plain(str(value), parts)
    if isinstance(value, bool | int | float | date | time) or (isinstance(value, str) and not _SURROGATE.search(value)):
        return value
    what = f"{dotted_key(parts)} holds {value!r}, which a TOML file cannot hold"
    raise UserError(what, "Use text, numbers, true or false, dates, arrays and tables of them.")


def _written_fields(table: ConfigTable) -> Iterable[tuple[str, Any]]:
    """TOML has no null, so None is written by omitting the key, which works only where None is also the default."""
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        if value is not None or field.get_default(call_default_factory=True, validated_data={}) is not None:
            yield key, value

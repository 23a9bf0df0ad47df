"""How is a resolved job written down as TOML?

The standard library reads TOML but does not write it. Invariant: what ``dump_toml`` writes loads back equal; a value
that TOML cannot hold is a ``UserError`` that names its place, never a quiet change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from functools import singledispatch
from pathlib import PurePath
from typing import Any

from closeranks.core.config.table import Table
from closeranks.core.errors import UserError

Parts = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NEEDS_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\\ud800-\udfff]')
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dotted(parts: Iterable[str | int]) -> str:
    """The name of a place: ``optim.groups.0.pattern``; a key that is not bare stands in quotes."""
    return ".".join(_key(str(part)) for part in parts)


def format_value(value: Any) -> str:
    """One value as the right side of ``key = value``; tables are written inline."""
    return _format(value)


def dump_toml(value: Table) -> str:
    """The whole table, defaults included, as the text of a job file."""
    return "\n".join(_table_lines(value, (), header="")).lstrip("\n") + "\n"


def _table_lines(table: Table | Mapping[str, Any], parts: Parts, header: str) -> Iterator[str]:
    """Plain values first: after a ``[header]`` TOML counts every key to that table."""
    entries = [(key, value) for key, value in _entries(table) if not _is_left_out(table, key, value, parts)]
    if header:
        yield f"\n{header}"
    for key, value in entries:
        if not _is_table(value) and not _is_array_of_tables(value):
            yield f"{_key(key)} = {_format_at(value, (*parts, key))}"
    for key, value in entries:
        yield from _nested_lines(value, (*parts, key))


def _nested_lines(value: Any, parts: Parts) -> Iterator[str]:
    name = dotted(part for part in parts if not isinstance(part, int))
    if _is_table(value):
        yield from _table_lines(value, parts, f"[{name}]")
    elif _is_array_of_tables(value):
        for index, element in enumerate(value):
            yield from _table_lines(element, (*parts, index), f"[[{name}]]")


def _entries(table: Table | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(table, Table):
        return [(name, getattr(table, name)) for name in type(table).model_fields]
    return [(str(key), value) for key, value in table.items()]


def _is_left_out(table: Table | Mapping[str, Any], key: str, value: Any, parts: Parts) -> bool:
    """TOML has no null, so None is said by silence, which only works where None is also the default."""
    if value is not None:
        return False
    field = type(table).model_fields.get(key) if isinstance(table, Table) else None
    if (
        field is None
        or field.is_required()
        or field.get_default(call_default_factory=True, validated_data={}) is not None
    ):
        raise _unwritable(value, (*parts, key))
    return True


def _is_table(value: Any) -> bool:
    return isinstance(value, Table | Mapping)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_table(element) for element in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quote(key)


def _quote(text: str) -> str:
    return '"' + _NEEDS_ESCAPE.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    if "\ud800" <= char <= "\udfff":
        raise TypeError("half a surrogate pair")
    return _ESCAPES.get(char) or f"\\u{ord(char):04X}"


def _format_at(value: Any, parts: Parts) -> str:
    try:
        return _format(value)
    except TypeError:
        raise _unwritable(value, parts) from None


def _unwritable(value: Any, parts: Parts) -> UserError:
    what = f"{dotted(parts)} holds {value!r}, which a TOML file cannot hold"
    return UserError(what, "Use text, numbers, true or false, dates, arrays and tables of them.")


@singledispatch
def _format(value: Any) -> str:
    raise TypeError(f"TOML has no {type(value).__name__}")


@_format.register
def _(value: str) -> str:
    return _quote(value)


@_format.register
def _(value: bool) -> str:
    return "true" if value else "false"


@_format.register
def _(value: int) -> str:
    return int.__repr__(value)


@_format.register
def _(value: float) -> str:
    """Python's shortest exact form is also TOML's, infinities and nan included."""
    return float.__repr__(value)


@_format.register(datetime)
@_format.register(date)
@_format.register(time)
def _(value: datetime | date | time) -> str:
    return value.isoformat()


@_format.register
def _(value: PurePath) -> str:
    return _quote(str(value))


@_format.register
def _(value: Enum) -> str:
    return _format(value.value)


@_format.register(list)
@_format.register(tuple)
def _(value: Sequence[Any]) -> str:
    return "[" + ", ".join(_format(element) for element in value) + "]"


@_format.register(Table)
@_format.register(Mapping)
def _(value: Table | Mapping[str, Any]) -> str:
    entries = [(key, element) for key, element in _entries(value) if not _is_left_out(value, key, element, ())]
    pairs = [f"{_key(key)} = {_format(element)}" for key, element in entries]
    return "{" + ", ".join(pairs) + "}"

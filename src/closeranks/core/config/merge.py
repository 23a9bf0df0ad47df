"""Merges the sources of a job into one tree in which every value knows its origin.

Order: defaults < file < Python < command line. Invariant: tables merge key by key; everything else, arrays included, is
replaced as a whole, together with its origins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.core.config.origin import ValueOrigin
from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import Parts, dotted_key
from closeranks.core.config.values import config_values
from closeranks.core.errors import UserError

OriginOf = Callable[[str], ValueOrigin]


@dataclass(slots=True)
class ConfigTree:
    """The merged values of all sources so far."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    lines: dict[str, ValueOrigin] = field(default_factory=dict)
    """The lines of tables and keys in the file, even where a later source overrides them."""

    def add(self, values: Mapping[str, Any], origin_of: OriginOf) -> None:
        """Merge a later source over the earlier ones."""
        _merge(self.values, values, (), lambda parts, value: self._record(parts, value, origin_of))

    def set(self, parts: Parts, value: Any, origin: ValueOrigin) -> None:
        """Set one place, reaching into arrays of tables by index (``optim.groups.0.lr_scale``)."""
        node: Any = self.values
        for index, part in enumerate(parts[:-1]):
            if not isinstance(node, dict | list):
                raise _no_element(parts[:index], None)
            if isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, list):
                raise _no_element(parts[:index], len(node))
            else:
                node = _table_at(node, str(part))
        if not isinstance(node, dict):
            raise _no_element(parts[:-1], len(node) if isinstance(node, list) else None)
        _merge(node, {str(parts[-1]): value}, parts[:-1], lambda at, new: self._record(at, new, lambda _: origin))

    def unset(self, parts: Parts) -> None:
        """Remove what any source set at one place, so that its default applies."""
        node: Any = self.values
        for part in parts[:-1]:
            if isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return
        if isinstance(node, list):
            raise UserError(
                f"{dotted_key(parts[:-1])} is an array, and its elements cannot be unset one by one",
                f"Give the whole array, as {dotted_key(parts[:-1])}=[...].",
            )
        if isinstance(node, dict):
            node.pop(str(parts[-1]), None)
            self._forget(dotted_key(parts))

    def origin_near(self, place: str) -> ValueOrigin | None:
        """The origin of a place or, if nothing set it, of the nearest enclosing place."""
        while place:
            if place in self.origins:
                return self.origins[place]
            below = [origin for key, origin in self.origins.items() if key.startswith(f"{place}.")]
            if below:
                is_from_file = any(origin.kind == "file" for origin in below)
                return self.lines.get(place, below[0]) if is_from_file else below[0]
            if place in self.lines:
                return self.lines[place]
            place = place.rpartition(".")[0]
        return None

    def _forget(self, place: str) -> None:
        for key in [key for key in self.origins if key == place or key.startswith(f"{place}.")]:
            del self.origins[key]

    def _record(self, parts: Parts, value: Any, origin_of: OriginOf) -> None:
        self._forget(dotted_key(parts))
        for leaf in config_values(value, parts):
            self.origins[leaf.place] = origin_of(leaf.place)


def _no_element(array: Parts, size: int | None) -> UserError:
    place = dotted_key(array)
    count = f"{place} has {size} element{'' if size == 1 else 's'}, counted from 0"
    what = f"{place} is not a table" if size is None else count
    return UserError(what, f"Give the whole array, as {dotted_key(p for p in array if not str(p).isdecimal())}=[...].")


def _table_at(node: dict[str, Any], key: str) -> Any:
    child = node.get(key)
    if not isinstance(child, dict | list):
        child = node[key] = {}
    return child


def _merge(into: dict[str, Any], values: Mapping[str, Any], parts: Parts, record: Callable[[Parts, Any], None]) -> None:
    for key, value in values.items():
        place = (*parts, key)
        current = into.get(key)
        if isinstance(value, Mapping) and isinstance(current, dict):
            _merge(current, value, place, record)
        else:
            into[key] = to_plain(value)
            record(place, value)


def to_plain(value: Any) -> Any:
    """A value as TOML would represent it. A ``ConfigTable`` from Python sets its whole table, defaults included."""
    if isinstance(value, ConfigTable):
        return {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(child) for child in value]
    return value

"""Takes the fields of a dataclass from plain values that were read from a file.

Invariant: what ``checked_fields`` returns can be passed to the dataclass, and each value is of the type that the field
is annotated with; whole numbers fit into 63 bits, so that none of them overflows a float or a date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_float(value: Any) -> bool:
    return type(value) is float or _is_int(value)


def _is_str(value: Any) -> bool:
    return type(value) is str


_FITS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "str": _is_str,
    "bool": lambda value: type(value) is bool,
    "int | None": lambda value: value is None or _is_int(value),
    "float | None": lambda value: value is None or _is_float(value),
    "list[int]": lambda value: type(value) is list and all(map(_is_int, value)),
    "list[str]": lambda value: type(value) is list and all(map(_is_str, value)),
    "dict[str, str]": lambda value: type(value) is dict and all(map(_is_str, value.values())),
    "dict[str, int]": lambda value: type(value) is dict and all(map(_is_int, value.values())),
    "dict[str, float]": lambda value: type(value) is dict and all(map(_is_float, value.values())),
}


_CHECKS: dict[type[Any], Mapping[str, Callable[[Any], bool] | None]] = {}


def _checks(kind: type[Any]) -> Mapping[str, Callable[[Any], bool] | None]:
    """The check of each field; None for a field that is made of other dataclasses, which the caller decodes itself."""
    if kind not in _CHECKS:
        _CHECKS[kind] = {field.name: _FITS.get(str(field.type)) for field in fields(kind)}
    return _CHECKS[kind]


def checked_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of those fields that ``kind`` has; ``TypeError`` if one has the wrong type."""
    checks = _checks(kind)
    found = {name: value for name, value in values.items() if name in checks}
    for name, value in found.items():
        check = checks[name]
        if check is not None and not check(value):
            raise TypeError(f"{name} of {kind.__name__} cannot be {str(value)[:40]!r}")
    return found

"""Describes the types and values of a job in plain words, for error messages.

Invariant: no term of Python or of the validation library reaches the user; every example shown is a value whose type
would be accepted at that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from functools import singledispatch
from pathlib import PurePath
from typing import Any, get_args

from closeranks.core.config.toml.writer import format_value
from closeranks.core.config.validation.schema_tree import SchemaNode, TypeOption, options_of

_LONGEST = 60
_ONE: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Any: "a value",
}
_MANY: dict[Any, str] = {
    bool: "true or false",
    int: "whole numbers",
    float: "numbers",
    str: "texts in quotes",
    Any: "values",
}
_SAMPLES: dict[Any, Any] = {bool: True, int: 1, float: 0.1, str: "text"}
_YES_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def describe_expected(options: tuple[TypeOption, ...]) -> str:
    """What a place accepts: ``a whole number``, ``an array of 2 numbers``."""
    kinds = [option.type for option in options]
    known = [option for option in options if not (option.type is int and float in kinds)]
    return " or ".join(dict.fromkeys(_expected(option) for option in known)) or "no value"


def _expected(option: TypeOption) -> str:
    if option.choices:
        return "one of " + ", ".join(str(choice) for choice in option.choices)
    if option.table or option.is_mapping:
        return "a table"
    if option.is_array:
        return _array(option)
    if isinstance(option.type, type) and issubclass(option.type, PurePath):
        return "a path in quotes"
    return _ONE.get(option.type, f"a {getattr(option.type, '__name__', 'value').lower()}")


def _array(option: TypeOption) -> str:
    arguments = [argument for argument in get_args(option.type) if argument is not Ellipsis]
    elements = {inner for argument in arguments for inner in options_of(argument)}
    if any(element.table for element in elements):
        return "an array of tables"
    kinds = {element.type for element in elements}
    word = _MANY.get(kinds.pop(), "values") if len(kinds) == 1 else "values"
    return f"an array of {len(arguments)} {word}" if option.is_fixed_array else f"an array of {word}"


@singledispatch
def describe_given(value: Any) -> str:
    """What was given instead: ``the text 'many'``."""
    return f"{value!r}"


@describe_given.register
def _(value: str) -> str:
    return (
        f"the text '{value if len(value) <= _LONGEST else value[: _LONGEST - 3] + '...'}'" if value else "an empty text"
    )


@describe_given.register
def _(value: bool) -> str:
    return format_value(value)


@describe_given.register(int)
@describe_given.register(float)
def _(value: int | float) -> str:
    return f"the number {format_value(value)}"


@describe_given.register(date)
@describe_given.register(time)
def _(value: date | time) -> str:
    return f"the date or time {format_value(value)}"


@describe_given.register
def _(value: Mapping) -> str:  # type: ignore[type-arg]  # singledispatch reads the bare class
    return "a table"


@describe_given.register(list)
@describe_given.register(tuple)
def _(value: list[Any] | tuple[Any, ...]) -> str:
    if value and all(isinstance(element, Mapping) for element in value):
        return "an array of tables"
    return f"an array of {len(value)} value{'' if len(value) == 1 else 's'}"


@describe_given.register
def _(value: None) -> str:
    return "None"


def example_value(node: SchemaNode, value: Any = None) -> str:
    """An acceptable value, as TOML: the one probably meant if it can be guessed, else the default, else a sample."""
    for found in (_meant(node, value), _declared(node), _sample(node.options)):
        if found is not None and found != ():
            return format_value(found)
    return ""


def _declared(node: SchemaNode) -> Any:
    """The field's own example or default. An element of an array has none, since the field's is the whole array."""
    if node.field is None or (node.parts and isinstance(node.parts[-1], int)):
        return None
    if node.field.examples:
        return node.field.examples[0]
    return None if node.field.is_required() else node.field.get_default(call_default_factory=True, validated_data={})


def _meant(node: SchemaNode, value: Any) -> Any:
    """``"200"`` for a number, ``200.0`` for a whole number, ``"True"`` for true or false."""
    kinds = {option.type for option in node.options}
    if bool in kinds and isinstance(value, str):
        return _YES_NO.get(value.strip().lower())
    if bool in kinds and value in (0, 1):
        return bool(value)
    if str in kinds and isinstance(value, int | float | date | time):
        return format_value(value)
    if not kinds & {int, float} or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
        return int(number) if float not in kinds and number.is_integer() else number if float in kinds else None
    except (ValueError, OverflowError):
        return None


def _sample(options: tuple[TypeOption, ...]) -> Any:
    for option in options:
        if option.choices:
            return option.choices[0]
        if option.is_array:
            arguments = [argument for argument in get_args(option.type) if argument is not Ellipsis]
            return [_sample(options_of(argument)) for argument in arguments]
        if option.type in _SAMPLES:
            return _SAMPLES[option.type]
    return "text"

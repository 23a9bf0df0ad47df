"""Derives from the config models which keys each table of a job may have, and what each key accepts.

Reads the type annotations of the models. Invariant: nothing here looks at values, so the answers hold for every job.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import Parts, dotted_key

_ARRAYS = (tuple, list, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)


@dataclass(frozen=True, slots=True)
class TypeOption:
    """One member of a union (or the only type there is), with the tag that selects it."""

    type: Any
    tag: str = ""

    @property
    def table(self) -> type[ConfigTable] | None:
        return self.type if isinstance(self.type, type) and issubclass(self.type, ConfigTable) else None

    @property
    def is_array(self) -> bool:
        return (get_origin(self.type) or self.type) in _ARRAYS

    @property
    def is_fixed_array(self) -> bool:
        """A tuple of a fixed length, such as a pair."""
        return get_origin(self.type) is tuple and Ellipsis not in get_args(self.type)

    @property
    def is_mapping(self) -> bool:
        return (get_origin(self.type) or self.type) in _MAPPINGS

    @property
    def choices(self) -> tuple[Any, ...]:
        """What a Literal allows; empty for every other type."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A place in the model: the types it accepts, the field that declares it, the enclosing place.

    No options: there is no such place.
    """

    parts: Parts
    options: tuple[TypeOption, ...]
    field: FieldInfo | None = None
    owner: SchemaNode | None = None

    @property
    def place(self) -> str:
        return dotted_key(self.parts)

    @property
    def tables(self) -> tuple[type[ConfigTable], ...]:
        return tuple(option.table for option in self.options if option.table)

    @property
    def holds_keys(self) -> bool:
        return any(option.table or option.is_mapping or option.type is Any for option in self.options)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for table in self.tables for key in table.model_fields))

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(choice for option in self.options for choice in option.choices)

    @property
    def tag_key(self) -> str:
        """The key that selects among the tables of a union: the one they share and that some of them pin to literals of
        their own. A key with the same choices in several tables does not discriminate."""
        for key in self.keys:
            fields = [table.model_fields.get(key) for table in self.tables]
            pinned = [choice for field in fields if field for choice in TypeOption(field.annotation).choices]
            if all(fields) and pinned and len(set(pinned)) == len(pinned):
                return key
        return "name"

    def child(self, key: str | int) -> SchemaNode:
        """The place under a key or index, in whichever members of a union have it."""
        found: list[TypeOption] = []
        field = self.field
        for option in self.options:
            declared = option.table.model_fields.get(str(key)) if option.table else None
            field = declared or field
            found += options_of(declared.annotation if declared else _element(option, key))
        return SchemaNode((*self.parts, key), tuple(dict.fromkeys(found)), field, self)

    def select_member(self, label: str | int) -> SchemaNode:
        """The member of a union that a validation error names."""
        named = tuple(option for option in self.options if label in _labels(option, self.tag_key))
        return SchemaNode(self.parts, named or self.options, self.field, self.owner)


def root_node(model: type[ConfigTable]) -> SchemaNode:
    return SchemaNode((), (TypeOption(model),))


def node_at(model: type[ConfigTable], parts: Parts) -> SchemaNode:
    """The place that a dotted key names."""
    node = root_node(model)
    for part in parts:
        node = node.child(part)
    return node


def node_of_error(model: type[ConfigTable], location: Sequence[str | int]) -> SchemaNode:
    """The place that a validation error names: pydantic includes the tried member of each union in its location."""
    node = root_node(model)
    steps = iter(location)
    for step in steps:
        if len(node.options) > 1:
            below = next(steps, None)
            if below is None:
                break
            node, step = node.select_member(step), below
        node = node.child(step)
    return node


def options_of(annotation: Any) -> tuple[TypeOption, ...]:
    """The members of a union in order, aliases and ``Annotated`` unwrapped; None is left out: TOML has no null."""
    if annotation is None or annotation is type(None):
        return ()
    if hasattr(annotation, "__value__"):
        return options_of(annotation.__value__)
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        tag = next((str(item.tag) for item in metadata if isinstance(item, Tag)), "")
        return tuple(TypeOption(option.type, option.tag or tag) for option in options_of(inner))
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(option for member in get_args(annotation) for option in options_of(member))
    return (TypeOption(annotation),)


def tables_under(node: SchemaNode) -> Iterator[SchemaNode]:
    """Every table below a place; an array of tables counts once, by its first element."""
    for key in node.keys:
        child = node.child(key)
        below = child.child(0) if any(option.is_array for option in child.options) else child
        if below.tables:
            yield below
            yield from tables_under(below)


def _element(option: TypeOption, key: str | int) -> Any:
    """The type an array or mapping holds under a key; None if it holds nothing there."""
    arguments = get_args(option.type)
    if option.type is Any:
        return Any
    if option.is_mapping:
        return arguments[1] if len(arguments) == 2 else Any
    if not option.is_array or not str(key).isdecimal():
        return None
    if not arguments:
        return Any
    index = int(key) if option.is_fixed_array else 0
    return arguments[index] if index < len(arguments) else None


def _labels(option: TypeOption, tag_key: str) -> tuple[Any, ...]:
    pinned = option.table.model_fields.get(tag_key) if option.table else None
    literals = get_args(pinned.annotation) if pinned and get_origin(pinned.annotation) is Literal else ()
    return (option.tag, getattr(option.type, "__name__", ""), *literals)

"""Turns the errors of the validation library into ``Problem``s that a newcomer understands.

Invariant: one problem per place, each with what is wrong and how to fix it; union tags and type names of the library
never appear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from closeranks.core.config.merge import ConfigTree
from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import Parts, dotted_key, format_value
from closeranks.core.config.validation.descriptions import describe_expected, describe_given, example_value
from closeranks.core.config.validation.schema_tree import SchemaNode, node_at, node_of_error, root_node, tables_under
from closeranks.core.errors import Problem, UserError
from closeranks.core.registry import closest_match

_MAX_ERRORS = 50
"""Nobody reads more of them, and wording each one takes time."""


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """One validation error, with the schema of its place."""

    kind: str
    node: SchemaNode
    value: Any
    details: Mapping[str, Any]
    message: str
    model: type[ConfigTable]
    source: str
    values: Mapping[str, Any]
    """The whole job as it was given."""

    @property
    def place(self) -> str:
        return self.node.place

    def write(self, value: str, place: str = "") -> str:
        """How to set a place in the source that set this one. A file cannot name an array's element: it is `there`."""
        if not value:
            return ""
        if self.source == "command line":
            return f"Write {place or self.place}={value}."
        key = self.node.parts[-1] if self.node.parts else ""
        if place or not any(isinstance(part, int) for part in self.node.parts):
            return f"Write {place or self.place} = {value}."
        return f"Write {value} there." if isinstance(key, int) else f"Write {dotted_key([key])} = {value} there."


@dataclass(frozen=True, slots=True)
class ProblemText:
    what: str
    fix: str = ""
    place: str | None = None
    """Set if it differs from the place of the error."""


def problems_of(model: type[ConfigTable], errors: Sequence[ErrorDetails], tree: ConfigTree) -> list[Problem]:
    """One problem per place: the most informative one if a union of types gave several."""
    found: dict[str, Problem] = {}
    for error in sorted(errors, key=lambda error: error["type"] in _TYPE_ERRORS)[:_MAX_ERRORS]:
        node = node_of_error(model, error["loc"])
        source = str(tree.origin_near(node.place) or "")
        details = error.get("ctx", {})
        invalid = InvalidValue(error["type"], node, error["input"], details, error["msg"], model, source, tree.values)
        answer = _ANSWERS.get(invalid.kind, _other)(invalid)
        place = invalid.place if answer.place is None else answer.place
        origin = str(tree.origin_near(place) or "")
        found.setdefault(place, Problem(place or "job", answer.what, answer.fix, origin))
    if len(errors) > _MAX_ERRORS:
        found[""] = Problem("job", f"and {len(errors) - _MAX_ERRORS:,} more problems")
    return list(found.values())


def _wrong_type(invalid: InvalidValue) -> ProblemText:
    node, value = invalid.node, invalid.value
    wanted = describe_expected(node.options)
    what = f"expected {wanted}, got {describe_given(value)}"
    if node.tables and isinstance(value, list):
        return ProblemText(what, f"Write [{invalid.place}] with single brackets, once.")
    if node.tables:
        key = node.keys[0]
        return ProblemText(
            what, f"Write its keys under [{invalid.place}], such as {key} = {example_value(node.child(key))}."
        )
    if wanted == "an array of tables" and isinstance(value, Mapping):
        return ProblemText(what, f"Write [[{invalid.place}]] with double brackets.")
    return ProblemText(what, invalid.write(example_value(node, value)))


def _missing(invalid: InvalidValue) -> ProblemText:
    node = invalid.node
    if isinstance(node.parts[-1], int):
        array = node_at(invalid.model, node.parts[:-1])
        what = f"expected {describe_expected(array.options)}, got {describe_given(invalid.value)}"
        return ProblemText(what, invalid.write(example_value(array), array.place), array.place)
    if node.tables:
        return ProblemText(f"the table [{invalid.place}] is missing", f"Add [{invalid.place}]{_needed_keys(node)}.")
    return ProblemText(f"it must be set{_help(node)}", invalid.write(example_value(node)))


def _needed_keys(node: SchemaNode) -> str:
    if len(node.tables) > 1:
        names = node.child(node.tag_key).choices
        return f" and set {node.tag_key} to one of {', '.join(str(name) for name in names)}" if names else ""
    needed = [key for key, field in node.tables[0].model_fields.items() if field.is_required()]
    return f" and set {', '.join(needed)}" if needed else ""


def _help(node: SchemaNode) -> str:
    """The first line of the field's docstring, for use inside a sentence."""
    text = (node.field.description or "").strip().split("\n")[0].rstrip(".") if node.field else ""
    text = text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
    return f" ({text})" if text else ""


def _unknown(invalid: InvalidValue) -> ProblemText:
    *around, key = invalid.node.parts
    owner = invalid.node.owner or root_node(invalid.model)
    elsewhere = _tables_with(invalid.model, str(key), invalid.place)
    if not around and isinstance(invalid.value, Mapping | list):
        return ProblemText("there is no such table", _near(str(key), owner.keys, "[{}]"))
    if len(elsewhere) in (1, 2):
        what = f"no such key; `{key}` is a key of {' and '.join(_header(node) for node in elsewhere)}"
        is_single = not isinstance(elsewhere[0].parts[-1], int)
        return ProblemText(
            what, invalid.write(_shown(invalid.value), f"{elsewhere[0].place}.{key}") if is_single else ""
        )
    if not around:
        return ProblemText("it is outside any table, and no table has such a key", _near(str(key), owner.keys, "[{}]"))
    return ProblemText(f"no such key{_variant(owner, invalid)}", _near(str(key), owner.keys))


def _tables_with(model: type[ConfigTable], key: str, place: str) -> list[SchemaNode]:
    return [node for node in tables_under(root_node(model)) if key in node.keys and f"{node.place}.{key}" != place]


def _header(node: SchemaNode) -> str:
    name = dotted_key(part for part in node.parts if not isinstance(part, int))
    return f"[[{name}]]" if isinstance(node.parts[-1], int) else f"[{name}]"


def _variant(owner: SchemaNode, invalid: InvalidValue) -> str:
    """A table of several kinds has the keys of the kind that its tag key selected."""
    whole = node_at(invalid.model, owner.parts)
    if len(whole.tables) < 2:
        return ""
    choices = owner.child(whole.tag_key).choices
    chosen = choices[0] if choices else _given_at(invalid.values, (*owner.parts, whole.tag_key))
    return f" where {owner.place}.{whole.tag_key} is {chosen or 'your own'}"


def _given_at(values: Any, parts: Parts) -> Any:
    """The job's value at a place; None if it sets none."""
    for part in parts:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _near(name: str, known: Sequence[str], form: str = "'{}'") -> str:
    if near := closest_match(name, known):
        return f"Did you mean {form.format(near)}?"
    return f"Known: {', '.join(known)}." if known else ""


def _shown(value: Any) -> str:
    try:
        return format_value(value)
    except UserError:
        return "..."


def _not_a_choice(invalid: InvalidValue) -> ProblemText:
    choices = [str(choice) for choice in invalid.node.choices]
    near = closest_match(str(invalid.value), choices)
    what = f"expected one of {', '.join(choices)}, got {describe_given(invalid.value)}"
    return ProblemText(what, f"Did you mean '{near}'?" if near else invalid.write(_shown(invalid.node.choices[0])))


def _unknown_tag(invalid: InvalidValue) -> ProblemText:
    node = invalid.node
    if not isinstance(invalid.value, Mapping):
        return _wrong_type(invalid)
    key = node.tag_key
    place = dotted_key((*node.parts, key))
    closed = [option.tag for option in node.options if option.tag and node.select_member(option.tag).child(key).choices]
    names = closed or [str(choice) for choice in node.child(key).choices]
    own = " Write your own as 'package.module:name'." if len(names) < len(node.options) else ""
    if key not in invalid.value:
        return ProblemText("it must be set", f"Choose one of {', '.join(names)}.{own}", place)
    name = invalid.value[key]
    return ProblemText(f"there is no {node.parts[-1]} '{name}'", f"{_near(str(name), names)}{own}", place)


def _out_of_range(words: str, limit: str) -> Callable[[InvalidValue], ProblemText]:
    def answer(invalid: InvalidValue) -> ProblemText:
        bound = invalid.details.get(limit)
        number = f"{bound:g}" if isinstance(bound, float) and abs(bound) < 1e6 else str(bound)
        kind = "" if limit == "multiple_of" else "a number "
        fix = invalid.write(number) if limit in ("ge", "le") else f"Write {kind}{words} {number}."
        return ProblemText(f"it must be {words} {number}, but is {_shown(invalid.value)}", fix)

    return answer


def _wrong_length(invalid: InvalidValue) -> ProblemText:
    if any(option.is_fixed_array for option in invalid.node.options):
        return _wrong_type(invalid)
    least, most = invalid.details.get("min_length"), invalid.details.get("max_length")
    bound = f"at least {least}" if least is not None else f"at most {most}"
    unit = "characters" if invalid.kind.startswith("string") else "values"
    return ProblemText(
        f"it must hold {bound} {unit}, but has {len(invalid.value)}", invalid.write(example_value(invalid.node))
    )


def _own_message(invalid: InvalidValue) -> ProblemText:
    """A validator of a config model words its own message: the first sentence is the problem, the rest is the fix."""
    text = str(invalid.details.get("error") or invalid.message).strip()
    what, _, fix = text.partition(". ")
    key = invalid.node.tag_key
    chosen = invalid.value.get(key) if len(invalid.node.tables) > 1 and isinstance(invalid.value, Mapping) else None
    is_about_tag = chosen is not None and f"'{chosen}'" in what
    return ProblemText(what.removesuffix("."), fix, dotted_key((*invalid.node.parts, key)) if is_about_tag else None)


def _pattern(invalid: InvalidValue) -> ProblemText:
    return ProblemText(
        f"{describe_given(invalid.value)} does not have the right form ({invalid.details.get('pattern')})"
    )


def _other(invalid: InvalidValue) -> ProblemText:
    if invalid.kind.endswith(("_type", "_parsing")):
        return _wrong_type(invalid)
    message = invalid.message.removeprefix("Input ").rstrip(".")
    return ProblemText(f"it {message[:1].lower()}{message[1:]}, but is {describe_given(invalid.value)}")


_TYPE_ERRORS = (
    "int_type",
    "float_type",
    "bool_type",
    "string_type",
    "tuple_type",
    "list_type",
    "dict_type",
    "model_type",
)
_ANSWERS: dict[str, Callable[[InvalidValue], ProblemText]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "literal_error": _not_a_choice,
    "union_tag_invalid": _unknown_tag,
    "union_tag_not_found": _unknown_tag,
    "greater_than": _out_of_range("above", "gt"),
    "greater_than_equal": _out_of_range("at least", "ge"),
    "less_than": _out_of_range("below", "lt"),
    "less_than_equal": _out_of_range("at most", "le"),
    "multiple_of": _out_of_range("a multiple of", "multiple_of"),
    "too_short": _wrong_length,
    "too_long": _wrong_length,
    "string_too_short": _wrong_length,
    "string_too_long": _wrong_length,
    "string_pattern_mismatch": _pattern,
    "value_error": _own_message,
    "assertion_error": _own_message,
}

"""Parses command-line overrides such as ``train.steps=200``.

The right side is a TOML value, or plain text where it is not valid TOML. Invariant: text is never changed by a guess;
if the key holds text (``run.name=7``), the value is exactly what was typed. ``~train.steps`` unsets a key: its default
applies, whatever the file, Python or an earlier override set.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.scanner import split_key, tokens
from closeranks.core.config.toml.writer import Parts, dotted_key
from closeranks.core.config.validation.descriptions import describe_expected, example_value
from closeranks.core.config.validation.schema_tree import SchemaNode, node_at
from closeranks.core.errors import Problem

_KEY_AHEAD = re.compile(r"""[\w."'-]+\s*=""")


UNSET_MARK = "~"
"""Prefix of a key that unsets it, as in Hydra."""


@dataclass(frozen=True, slots=True)
class Override:
    parts: Parts
    value: Any
    is_unset: bool = False


def parse_overrides(model: type[ConfigTable], texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """The overrides of the command line in order, and a problem for each part that cannot be parsed."""
    found = [item for text in texts for item in _parse(model, text, ())]
    overrides = [item for item in found if isinstance(item, Override)]
    return overrides, [item for item in found if isinstance(item, Problem)]


def parse_value(text: str) -> Any:
    """The right side: ``[0.9, 0.99]``, ``true`` and ``3e-4`` are TOML; ``8b`` is not and stays text."""
    text = text.strip()
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return values["value"] if len(values) == 1 else text


def split_pairs(text: str) -> list[str]:
    """Split ``data=2 tensor=2`` into its pairs, at blanks and commas outside quotes and brackets."""
    pieces = [""]
    for token in tokens(text):
        is_gap = token.depth == 0 and (token.text.isspace() or token.text == ",")
        if is_gap and _KEY_AHEAD.match(text, token.start + len(token.text)):
            pieces.append("")
        else:
            pieces[-1] += token.text
    return [piece.strip().rstrip(",") for piece in pieces if piece.strip(" ,\t\n")]


def _parse(model: type[ConfigTable], text: str, prefix: Parts) -> Iterator[Override | Problem]:
    if text.startswith(UNSET_MARK):
        yield _parse_unset(model, text)
        return
    key, equals, right = text.partition("=")
    parts = (*prefix, *split_key(key)) if key.strip() else prefix
    problem = _key_problem(model, text, bool(equals), parts, prefix)
    if problem:
        yield problem
        return
    node = node_at(model, parts)
    value = _typed(node, right.strip(), parse_value(right))
    is_pairs = isinstance(value, str) and node.holds_keys and not any(o.type in (str, Any) for o in node.options)
    if not is_pairs:
        yield Override(parts, value)
        return
    pairs = split_pairs(value)
    if not pairs or not all("=" in pair for pair in pairs):
        yield _not_pairs(node, value)
        return
    for pair in pairs:
        yield from _parse(model, pair, parts)


def _parse_unset(model: type[ConfigTable], text: str) -> Override | Problem:
    key = text.removeprefix(UNSET_MARK).strip()
    if problem := _text_problem(text):
        return problem
    if "=" in key:
        return _problem(text, "a key that is unset has no value", f"Write {UNSET_MARK}{key.partition('=')[0].strip()}")
    parts = split_key(key) if key else ()
    if not parts:
        return _problem(text, f"there is no key after `{UNSET_MARK}`", f"Write {UNSET_MARK}table.key")
    for length in range(1, len(parts) + 1):
        if not node_at(model, parts[:length]).options:
            keys = node_at(model, parts[: length - 1]).keys
            near = get_close_matches(str(parts[length - 1]), keys, n=1)
            fix = f"Did you mean '{near[0]}'" if near else f"Use one of {', '.join(keys)}" if keys else "Leave it out"
            return Problem(text, "no such key", f"{fix}{'?' if near else '.'}", "command line")
    return Override(tuple(parts), None, is_unset=True)


def _typed(node: SchemaNode, text: str, value: Any) -> Any:
    """For keys that hold text, what was typed: ``run.name=7`` is the text 7, unless the key also accepts a number."""
    kinds = {option.type for option in node.options}
    takes_value = type(value) in kinds or (isinstance(value, int) and float in kinds) or Any in kinds
    takes_text = str in kinds or text in node.choices
    return text if takes_text and not takes_value else value


def _key_problem(model: type[ConfigTable], text: str, has_equals: bool, parts: Parts, prefix: Parts) -> Problem | None:
    if problem := _text_problem(text):
        return problem
    if text.startswith("-"):
        return _problem(text, "a setting of the job has no dashes", f"Write {text.lstrip('-').replace(' ', '=')}")
    if not has_equals:
        shown = example_value(node_at(model, parts)) if parts and node_at(model, parts).options else "VALUE"
        return _problem(text, "there is no `=` in it", f"Write {text.strip() or 'table.key'}={shown}")
    if parts == prefix:
        named = text.partition("=")[0].strip()
        what = f"`{named}` is not a key" if named else "there is no key before `=`"
        return _problem(text, what, "Write table.key=VALUE, such as train.steps=200")
    return _path_problem(model, parts)


def _text_problem(text: str) -> Problem | None:
    is_broken = any("\ud800" <= char <= "\udfff" for char in text)
    return _problem(ascii(text), "it is not UTF-8 text", "Type it again by hand") if is_broken else None


def _path_problem(model: type[ConfigTable], parts: Parts) -> Problem | None:
    for length in range(1, len(parts)):
        node = node_at(model, parts[:length])
        if node.options and not node.holds_keys and not any(option.is_array for option in node.options):
            what = f"{node.place} holds {describe_expected(node.options)}, so there is no `{parts[length]}` in it"
            return _problem(dotted_key(parts), what, f"Write {node.place}={example_value(node)}")
    return None


def _not_pairs(node: SchemaNode, value: str) -> Problem:
    key = node.keys[0] if node.keys else "key"
    what = (
        f"it is a table, and `{value}` is not a list of key=value pairs"
        if value
        else "it is a table, and nothing is set"
    )
    return _problem(node.place, what, f'Write {node.place}.{key}=VALUE, or {node.place}="{key}=VALUE key=VALUE"')


def _problem(place: str, what: str, fix: str) -> Problem:
    return Problem(place.strip() or "(empty)", what, f"{fix}.", "command line")

"""Finds the line on which each key of a job file stands.

The TOML reader of the standard library does not report lines, so this scanner recovers them: it knows just enough of
TOML to separate statements (quotes, brackets, comments). Invariant: it never fails, not even on broken text; a key it
cannot locate falls back to the line of the enclosing table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from closeranks.core.config.toml.writer import Parts, dotted_key

_TOKEN = re.compile(
    r'''
      """ (?: \\. | [^\\] )*? (?: "{3,5} | \Z )
    | \'\'\' .*? (?: '{3,5} | \Z )
    | " (?: \\. | [^"\\\n] )* "?
    | ' [^'\n]* '?
    | \# [^\n]*
    | [^\S\n]+
    | [^\s"'#\[\]{},=]+
    | .
    ''',
    re.VERBOSE | re.DOTALL,
)
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}
_HEADER = re.compile(r"\s*(\[\[?)(.*?)\]?\]?\s*(?:#.*)?", re.DOTALL)
_KEY = re.compile(r"""\s*((?: [\w\s.-] | "(?:\\.|[^"\\\n])*" | '[^'\n]*' )+?)\s*[=:]""", re.VERBOSE)


@dataclass(frozen=True, slots=True)
class TomlToken:
    text: str
    start: int
    depth: int
    """How many brackets are open around it; a bracket itself is not counted as inside."""


@dataclass(frozen=True, slots=True)
class TomlStatement:
    """A header or a ``key = value``, which may run over several lines."""

    text: str
    first_line: int
    last_line: int
    place: str = ""
    """The dotted key it sets; empty if none could be read."""

    @property
    def is_header(self) -> bool:
        return self.text.lstrip().startswith("[")


def tokens(text: str) -> Iterator[TomlToken]:
    """Quoted text, comments, brackets and words, in order; concatenated they are the text again."""
    depth = 0
    for match in _TOKEN.finditer(text):
        change = _BRACKETS.get(match.group(), 0)
        depth = max(0, depth + min(change, 0))
        yield TomlToken(match.group(), match.start(), depth)
        depth += max(change, 0)


def statements(text: str) -> list[TomlStatement]:
    """Every statement of a job file with its line; blank lines and comments are left out."""
    arrays: dict[Parts, int] = {}
    table: Parts = ()
    found: list[TomlStatement] = []
    for raw in _split(text):
        parts: Parts | None
        if raw.is_header:
            parts = table = _header_parts(raw.text, arrays)
        else:
            keys = _key_parts(raw.text)
            parts = (*table, *keys) if keys else None
        found.append(TomlStatement(raw.text, raw.first_line, raw.last_line, dotted_key(parts or ())))
    return found


def lines_of(found: list[TomlStatement]) -> dict[str, int]:
    """The line of each place that has its own statement; the first one if it has several."""
    lines: dict[str, int] = {}
    for statement in found:
        lines.setdefault(statement.place, statement.first_line)
        if statement.text.lstrip().startswith("[["):
            lines.setdefault(statement.place.rpartition(".")[0], statement.first_line)
    lines.pop("", None)
    return lines


def _split(text: str) -> Iterator[TomlStatement]:
    line = first = 1
    start = 0
    for token in tokens(text + "\n"):
        if token.text == "\n" and token.depth == 0:
            piece = text[start : token.start]
            if piece.strip() and not piece.lstrip().startswith("#"):
                yield TomlStatement(piece, first, line)
            start, first = token.start + 1, line + 1
        line += token.text.count("\n")
    if start < len(text) and text[start:].strip():
        yield TomlStatement(text[start:], first, text.count("\n") + 1)


def _header_parts(text: str, arrays: dict[Parts, int]) -> Parts:
    """The place of ``[a.b]`` or ``[[a.b]]``; a path through an array of tables refers to its last element."""
    match = _HEADER.fullmatch(text)
    names = split_key(match.group(2)) if match else ()
    parts: Parts = ()
    for index, name in enumerate(names):
        parts = (*parts, name)
        is_last = index == len(names) - 1
        if match and is_last and match.group(1) == "[[":
            arrays[parts] = arrays.get(parts, -1) + 1
        if parts in arrays:
            parts = (*parts, arrays[parts])
    return parts


def _key_parts(text: str) -> tuple[str, ...]:
    match = _KEY.match(text)
    return split_key(match.group(1)) if match else ()


def split_key(text: str) -> tuple[str, ...]:
    """The parts of a dotted key, read by the TOML reader itself."""
    try:
        node: Any = tomllib.loads(f"{text.strip()} = 0")
    except (ValueError, RecursionError):
        return ()
    parts: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        name, node = next(iter(node.items()))
        parts.append(name)
    return tuple(parts) if node == 0 else ()

"""Parses a job file and reports where it is not valid TOML.

Invariant: a broken file yields every broken line that can be skipped safely, each in plain words with its line and
column, not only the first. A line is skipped only if it is a complete ``key = value``, so that no later problem is a
consequence of skipping it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from closeranks.core.config.toml.scanner import TomlStatement, lines_of, statements
from closeranks.core.errors import Problem

_POSITION = re.compile(r"(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL)
_MAX_PROBLEMS = 50
_LONGEST_SHOWN = 70


@dataclass(frozen=True, slots=True)
class JobText:
    """A job file as read: its values, the line of each place, and the problems found."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    is_whole: bool = True
    """False if the rest of the file makes no sense without the broken part."""


@dataclass(frozen=True, slots=True)
class TomlError:
    """One syntax error that the TOML reader reported."""

    message: str
    line: int
    column: int
    source: str
    """The text of that line."""
    statement: TomlStatement
    earlier_line: int
    """The line where the same key or table already occurs; 0 if it does not."""

    @property
    def rest(self) -> str:
        return self.source[self.column - 1 :].strip()

    @property
    def is_alone(self) -> bool:
        """Whether the statement is a ``key = value`` on one line, which the rest of the file does not need."""
        statement = self.statement
        is_one_line = statement.first_line == statement.last_line == self.line
        return is_one_line and bool(statement.place) and not statement.is_header


ProblemWords = tuple[str, str]


def read_toml(text: str, name: str) -> JobText:
    """Parse a job file, skipping broken lines as far as is safe."""
    lines = lines_of(statements(text))
    problems: list[Problem] = []
    rest = text
    while len(problems) < _MAX_PROBLEMS:
        try:
            return JobText(name, tomllib.loads(rest), lines, tuple(problems))
        except RecursionError:
            problems.append(
                Problem(name, "it is nested too deeply to read", "Write fewer brackets inside one another.")
            )
            break
        except ValueError as error:
            toml_error = _toml_error(rest, str(error))
            problems.append(_problem(toml_error, name))
            if not toml_error.is_alone:
                break
            rest = _without_line(rest, toml_error.line)
    return JobText(name, {}, lines, tuple(problems), is_whole=False)


def _without_line(text: str, line: int) -> str:
    parts = text.split("\n")
    parts[line - 1] = ""
    return "\n".join(parts)


def _toml_error(text: str, message: str) -> TomlError:
    match = _POSITION.fullmatch(message)
    what = match["what"] if match else message
    sources = text.split("\n")
    found = statements(text)
    line, column = (int(match["line"]), int(match["column"])) if match and match["line"] else _end(found, sources)
    around = [s for s in found if s.first_line <= line <= s.last_line]
    statement = around[0] if around else TomlStatement(sources[line - 1], line, line)
    if what.startswith(("Unclosed", "Unterminated", "Expected ']", 'Expected "')):
        line, column = _opening(statement, sources)
    earlier = lines_of(found).get(statement.place, 0)
    earlier = earlier if earlier < statement.first_line else 0
    return TomlError(what, line, column, sources[line - 1].rstrip("\r"), statement, earlier)


def _end(found: list[TomlStatement], sources: list[str]) -> tuple[int, int]:
    """No position: the reader ran to the end. The cause is the first statement that does not parse on its own."""
    line = next((s.last_line for s in found if not _can_stand_alone(s)), found[-1].last_line if found else 1)
    return line, len(sources[line - 1]) + 1


def _can_stand_alone(statement: TomlStatement) -> bool:
    try:
        tomllib.loads(statement.text)
    except ValueError:
        return False
    return True


def _opening(statement: TomlStatement, sources: list[str]) -> tuple[int, int]:
    """A bracket or quote that is never closed is detected late; report it where it opens."""
    source = sources[statement.first_line - 1]
    after_key = source.find("=") + 1
    return statement.first_line, after_key + len(source[after_key:]) - len(source[after_key:].lstrip()) + 1


def _problem(toml_error: TomlError, name: str) -> Problem:
    what, fix = _problem_words(toml_error)
    shown = toml_error.source.strip()
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 3] + "..."
    place = toml_error.statement.place or f"line {toml_error.line}"
    return Problem(place, f"{what} (column {toml_error.column} of `{shown}`)", fix, f"{name}:{toml_error.line}")


def _problem_words(toml_error: TomlError) -> ProblemWords:
    for start, words in _ANSWERS:
        if toml_error.message.startswith(start):
            return words(toml_error) if callable(words) else words
    return toml_error.message[:1].lower() + toml_error.message[1:], "Look at this line and the one before it."


def _no_value(toml_error: TomlError) -> ProblemWords:
    rest = toml_error.rest.split("#")[0].strip().rstrip(",")
    begins_earlier = toml_error.statement.first_line < toml_error.line
    if begins_earlier:
        what = f"`{rest}` is not a value of the array that begins on line {toml_error.statement.first_line}"
        return what, "Close that array with `]`, or put text in quotes."
    if not rest:
        return "there is no value after `=`", "Write a value, or delete the line to keep the default."
    if rest.lower() in ("true", "false"):
        return f"`{rest}` is not a value", f"Write {rest.lower()}, in lower case."
    if rest.lower() in ("none", "null", "nil"):
        return f"`{rest}` is not a value", "Delete the line: a key that is not set keeps its default."
    if re.fullmatch(r"[+-]?\.\d+(e[+-]?\d+)?", rest, re.IGNORECASE):
        return f"the number `{rest}` has no digit before its point", f"Write {rest.replace('.', '0.')}."
    text = re.sub("[\"']", "", rest)
    return f"`{rest}` is not a value", f'Write a number, true or false, or put text in quotes: "{text}".'


def _too_much(toml_error: TomlError) -> ProblemWords:
    if toml_error.rest.startswith(("//", ";")):
        return f"`{toml_error.rest}` comes after the value", "A comment begins with #."
    if toml_error.rest.startswith(","):
        return "a comma comes after the value", "Delete it: lines of a table need no separator."
    if toml_error.statement.is_header:
        return f"`{toml_error.rest}` comes after the table header", "Put it on a line of its own."
    word = re.split(r"[\s,=]", toml_error.source[: toml_error.column - 1])[-1] + re.split(r"[\s,#]", toml_error.rest)[0]
    if re.match(r"[\w+-]", word) and not toml_error.rest.startswith(word):
        return f"`{word}` is not a value", f'Write a plain number, or put text in quotes: "{word}".'
    what = f"`{toml_error.rest}` comes after the value"
    return what, "Put text in quotes, write one key on each line, and begin comments with #."


def _no_equals(toml_error: TomlError) -> ProblemWords:
    if toml_error.rest.startswith(":"):
        return "there is `:` instead of `=`", "Write key = value."
    return "there is no `=` after the key", "Write key = value; a key of several words is joined by _."


def _twice(toml_error: TomlError) -> ProblemWords:
    before = (
        f"; line {toml_error.earlier_line} has it already"
        if toml_error.earlier_line
        else ", or is both a key and a table"
    )
    if toml_error.statement.is_header:
        name = toml_error.statement.text.split("#")[0].strip()
        return f"the table {name} appears a second time{before}", "Keep one header and put all its keys under it."
    return f"this key appears a second time{before}", "Keep one of the two."


def _bad_key(toml_error: TomlError) -> ProblemWords:
    return ("the table header has no name", "Write [table].") if toml_error.statement.is_header else _INLINE


def _bad_character(toml_error: TomlError) -> ProblemWords:
    if "\\n" in toml_error.message or "\\r" in toml_error.message:
        return "the quoted text does not end on its line", "Close it with the same quote that opened it."
    return (
        f"the text holds the {toml_error.message[:1].lower()}{toml_error.message[1:]}",
        "Delete it; it may not be visible.",
    )


_INLINE: ProblemWords = (
    "the inline table {...} is not well formed",
    "Keep it on one line, key = value with a comma between and none at the end, or write it as a [table].",
)
_ESCAPE: ProblemWords = (
    "a backslash in double quotes begins an escape",
    "Use single quotes: 'C:\\data', or write \\\\.",
)
_ANSWERS: tuple[tuple[str, ProblemWords | Callable[[TomlError], ProblemWords]], ...] = (
    ("Invalid value", _no_value),
    ("Expected newline", _too_much),
    ("Expected '=' after", _no_equals),
    ("Cannot overwrite", _twice),
    ("Cannot declare", _twice),
    ("Cannot redefine", _twice),
    (
        "Invalid statement",
        ("this is neither `key = value` nor a [table]", "Begin comments with #; keys use a-z, 0-9, _ and -."),
    ),
    ("Unclosed array", ("the array is not closed, or lacks a comma", "Write [1, 2]: commas between, `]` at the end.")),
    ("Unclosed inline", _INLINE),
    ("Invalid initial character", _bad_key),
    ("Duplicate inline", ("a key appears twice in the inline table", "Keep one of the two.")),
    (
        "Cannot mutate",
        ("this adds to a table or array that is complete already", "Write all of its keys in one place."),
    ),
    ("Unescaped", _ESCAPE),
    ("Invalid hex", _ESCAPE),
    ("Escaped character", _ESCAPE),
    ("Unterminated string", ("the quoted text is never closed", "Close it with the same quotes that opened it.")),
    ('Expected "', ("the quoted text is never closed", "Close it with the same quotes that opened it.")),
    ("Illegal character", _bad_character),
    ("Found invalid character", _bad_character),
    ("Expected ']", ("the table header is not closed", "Write [table], or [[table]] for one element of an array.")),
    ("Invalid date", ("this date does not exist", "Write it as 2030-01-31, or as text in quotes.")),
    ("Exceeds the limit", ("this number has too many digits", "Write a smaller one.")),
)

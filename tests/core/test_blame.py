from __future__ import annotations

import json

from closeranks.core.blame import describe, shown


def failing() -> None:
    json.loads("{")


def test_names_the_users_line_below_which_the_library_failed() -> None:
    try:
        failing()
    except ValueError as error:
        said = describe(error)
    line = failing.__code__.co_firstlineno + 1
    assert said.startswith("JSONDecodeError: Expecting property name")
    assert said.endswith(f"({shown(__file__)}:{line})")


def test_an_error_without_words_or_lines() -> None:
    assert describe(KeyError()) == "KeyError"

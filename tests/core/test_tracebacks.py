from __future__ import annotations

import json

from closeranks.core.tracebacks import MAX_MESSAGE_CHARS, describe_error, display_path, printable_message


def failing() -> None:
    json.loads("{")


def test_names_the_users_line_below_which_the_library_failed() -> None:
    try:
        failing()
    except ValueError as error:
        said = describe_error(error)
    line = failing.__code__.co_firstlineno + 1
    assert said.startswith("JSONDecodeError: Expecting property name")
    assert said.endswith(f"({display_path(__file__)}:{line})")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_message_is_bounded_and_printable_whatever_the_exception_holds() -> None:
    assert printable_message(ValueError("bad \udcff \x1b[31mred\x00\r")) == r"bad \udcff \x1b[31mred\x00\r"
    assert printable_message(ValueError("two\nlines\tand Grüße")) == "two\nlines\tand Grüße"
    assert printable_message(Unspeakable()) == "(its message cannot be shown: __str__ raised RuntimeError)"
    long = printable_message(ValueError("x" * 5_000_000))
    assert long.endswith("... (5,000,000 characters in all)")
    assert len(long) < MAX_MESSAGE_CHARS + 50


def test_an_error_without_words_or_lines() -> None:
    assert describe_error(KeyError()) == "KeyError"

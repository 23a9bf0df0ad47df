"""What a person reads when a job file is not TOML."""

from __future__ import annotations

import pytest

from closeranks.core.config.toml.parser import read_toml
from tests.core.config.conftest import Problems

CASES = {
    "a = many": ("`many` is not a value", 'Write a number, true or false, or put text in quotes: "many".', 5),
    "a = True": ("`True` is not a value", "Write true, in lower case.", 5),
    "a = None": ("`None` is not a value", "Delete the line: a key that is not set keeps its default.", 5),
    "a = .5": ("the number `.5` has no digit before its point", "Write 0.5.", 5),
    "a =": ("there is no value after `=`", "Write a value, or delete the line to keep the default.", 4),
    "a = # x": ("there is no value after `=`", "Write a value, or delete the line to keep the default.", 5),
    "a = 8b": ("`8b` is not a value", 'Write a plain number, or put text in quotes: "8b".', 6),
    "a = 01": ("`01` is not a value", 'Write a plain number, or put text in quotes: "01".', 6),
    "a = 10%": ("`10%` is not a value", 'Write a plain number, or put text in quotes: "10%".', 7),
    "a = 1 2": (
        "`2` comes after the value",
        "Put text in quotes, write one key on each line, and begin comments with #.",
        7,
    ),
    "a = 5 // c": ("`// c` comes after the value", "A comment begins with #.", 7),
    "a = 1,": ("a comma comes after the value", "Delete it: lines of a table need no separator.", 6),
    "a: 1": ("there is `:` instead of `=`", "Write key = value.", 2),
    'a = "C:\\data"': (
        "a backslash in double quotes begins an escape",
        "Use single quotes: 'C:\\data', or write \\\\.",
        10,
    ),
    'a = "x': ("the quoted text does not end on its line", "Close it with the same quote that opened it.", 7),
    "a = 'x": ("the quoted text is never closed", "Close it with the same quotes that opened it.", 5),
    "a = [1 2]": ("the array is not closed, or lacks a comma", "Write [1, 2]: commas between, `]` at the end.", 5),
    "a = {b=1,b=2}": ("a key appears twice in the inline table", "Keep one of the two.", 13),
}


@pytest.mark.parametrize(("line", "answer"), CASES.items(), ids=CASES)
def test_a_broken_line_is_named_shown_and_looked_past(line: str, answer: tuple[str, str, int]) -> None:
    what, fix, column = answer
    job = read_toml(f"[t]\nbefore = 1\n{line}\nafter = 2\n", "job.toml")
    (problem,) = job.problems
    assert problem.what == f"{what} (column {column} of `{line.strip()}`)"
    assert (problem.fix, problem.place, problem.origin) == (fix, "t.a", "job.toml:3")
    assert job.is_whole
    assert job.values == {"t": {"before": 1, "after": 2}}


STOPPERS = {
    "[t\na = 1\n": ("line 1", "the table header is not closed", "job.toml:1"),
    "[t]\na = 1\n[t]\n": ("t", "the table [t] appears a second time; line 1 has it already", "job.toml:3"),
    "a = [1,\nb = 2\n": ("a", "`b = 2` is not a value of the array that begins on line 1", "job.toml:2"),
    "a = [1,\n2\n": ("a", "the array is not closed, or lacks a comma", "job.toml:1"),
    'a = """x\n\n': ("a", "the quoted text is never closed", "job.toml:1"),
    "[t] x\n": ("line 1", "`x` comes after the table header", "job.toml:1"),
    "[]\n": ("line 1", "the table header has no name", "job.toml:1"),
    "some words\n": ("line 1", "there is no `=` after the key", "job.toml:1"),
    "= 3\n": ("line 1", "this is neither `key = value` nor a [table]", "job.toml:1"),
}


@pytest.mark.parametrize(("text", "answer"), STOPPERS.items(), ids=map(repr, STOPPERS))
def test_where_the_rest_would_make_no_sense_reading_stops(text: str, answer: tuple[str, str, str]) -> None:
    job = read_toml(text, "job.toml")
    (problem,) = job.problems
    assert (problem.place, problem.what.split(" (column")[0], problem.origin) == answer
    assert problem.fix
    assert not job.is_whole


def test_the_same_key_twice_names_the_first_line() -> None:
    job = read_toml("[t]\na = 1\na = 2\n", "job.toml")
    assert job.problems[0].what.startswith("this key appears a second time; line 2 has it already")
    assert job.values == {"t": {"a": 1}}


def test_every_broken_line_at_once() -> None:
    job = read_toml("a = x\nb = 1\nc = .5\nd = 'x\n[t\n", "job.toml")
    assert [problem.origin for problem in job.problems] == ["job.toml:1", "job.toml:3", "job.toml:4", "job.toml:5"]


def test_a_broken_file_still_reports_bad_overrides(problems: Problems) -> None:
    assert [p.place for p in problems("[train", "nonsense")] == ["train", "nonsense"]


def test_a_long_line_is_shortened() -> None:
    (problem,) = read_toml("a = x" + "y" * 500, "job.toml").problems
    assert len(problem.what.split("(column")[1]) < 100


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = 1\nb = " + "9" * 5000 + "\nc = 1"], ids=["deep", "long"])
def test_what_overwhelms_the_reader_is_a_problem_too(text: str) -> None:
    assert len(read_toml(text, "job.toml").problems) == 1


def test_a_good_file_is_read_with_its_lines() -> None:
    job = read_toml("[t]\na = 1\n", "job.toml")
    assert (job.values, job.lines, job.problems, job.is_whole) == ({"t": {"a": 1}}, {"t": 1, "t.a": 2}, (), True)

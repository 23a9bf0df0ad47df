from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.config.toml.scanner import lines_of, split_key, statements, tokens

JOB = '''# a comment [not.a.table]
[run]   # the run
name = "a # b [c]"
"odd key" = 1

[optim]
betas = [
  0.9,  # with a ] in a comment
  0.95,
]
note = """
[fake]
steps = 1
"""
path = \'\'\'
[fake2]\'\'\'
schedule.warmup = 3
inline = { a = 1, b = 2 }

[[optim.groups]]
pattern = "x"
[optim.groups.extra]
z = 1
[[optim.groups]]
pattern = 'y'

[ model . args ]
x = 1
'''


def test_every_key_has_its_line() -> None:
    lines = lines_of(statements(JOB))
    assert lines == {
        "run": 2,
        "run.name": 3,
        'run."odd key"': 4,
        "optim": 6,
        "optim.betas": 7,
        "optim.note": 11,
        "optim.path": 15,
        "optim.schedule.warmup": 17,
        "optim.inline": 18,
        "optim.groups": 20,
        "optim.groups.0": 20,
        "optim.groups.0.pattern": 21,
        "optim.groups.0.extra": 22,
        "optim.groups.0.extra.z": 23,
        "optim.groups.1": 24,
        "optim.groups.1.pattern": 25,
        "model.args": 27,
        "model.args.x": 28,
    }


def test_the_first_of_two_lines_counts() -> None:
    assert lines_of(statements("a = 1\na = 2")) == {"a": 1}


def test_windows_line_ends_do_not_shift_lines() -> None:
    assert lines_of(statements("[a]\r\nb = 1\r\nc = 2")) == {"a": 1, "a.b": 2, "a.c": 3}


def test_an_unclosed_bracket_swallows_no_earlier_line() -> None:
    found = statements("a = 1\nb = [1,\nc = 3\n")
    assert [(s.place, s.first_line) for s in found] == [("a", 1), ("b", 2)]


def test_split_key_reads_quotes_and_refuses_nonsense() -> None:
    assert split_key('a."b.c" . d') == ("a", "b.c", "d")
    assert split_key("a b") == ()
    assert split_key("") == ()
    assert split_key("# a") == ()
    assert split_key("a = 1 # b") == ()


@given(st.text(alphabet="ab=.[]{}\"'#\n, \\\r1", max_size=60))
def test_the_scanner_never_fails_and_loses_nothing(text: str) -> None:
    assert "".join(token.text for token in tokens(text)) == text
    for statement in statements(text):
        assert 1 <= statement.first_line <= statement.last_line <= text.count("\n") + 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["1", '"#"', "[1,\n2]", "'['", '"""\n]"""', "{ x = 1 }"]), st.integers(0, 2)),
        max_size=8,
    )
)
def test_keys_are_found_between_values_of_any_height(values: list[tuple[str, int]]) -> None:
    text, expected = "", {}
    for index, (value, blank) in enumerate(values):
        text += "\n" * blank
        expected[f"k{index}"] = text.count("\n") + 1
        text += f"k{index} = {value} # note\n"
    assert lines_of(statements(text)) == expected

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.telemetry.step_range import StepRange, parse_step_range


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_a_window_names_the_steps_of_a_slice(first: int, length: int) -> None:
    window = parse_step_range(f"{first}:{first + length}")
    assert window is not None
    assert [step for step in range(first - 2, first + length + 2) if step in window] == list(
        range(first, first + length)
    )


def test_the_empty_text_names_no_window() -> None:
    assert parse_step_range(" ") is None
    assert parse_step_range(" 10 : 13 ") == StepRange(10, 12)


@pytest.mark.parametrize(
    ("text", "words"),
    [("10", "names no steps"), ("a:b", "names no steps"), ("-1:4", "names no steps"), ("0:3", "Steps count from 1"),
     ("5:5", 'write "5:6"'), ("9:3", 'write "9:10"')],
)  # fmt: skip
def test_a_wrong_window_says_how_to_write_it(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_step_range(text)

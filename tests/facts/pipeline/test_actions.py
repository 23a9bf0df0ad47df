import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.facts.pipeline.actions import ACTION_KINDS, Action, completed_actions, dependencies


@given(st.builds(Action, st.integers(0, 500), st.sampled_from(ACTION_KINDS), st.integers(0, 500)))
def test_an_action_is_read_back_from_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_the_text_is_stage_kind_micro_batch() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("12W34") == Action(12, "W", 34)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2SEND_F0", "2F0 "])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="Write 2F0"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F3", []),
        ("2F3", ["1F3"]),
        ("2B3", ["2F3", "3I3"]),
        ("2I3", ["2F3", "3I3"]),
        ("3I3", ["3F3"]),
        ("2W3", ["2I3"]),
    ],
)
def test_what_an_action_needs(action: str, expected: list[str]) -> None:
    assert [str(need) for need in dependencies(Action.parse(action), num_stages=4)] == expected


def test_a_whole_backward_gives_both_parts() -> None:
    assert [str(given) for given in completed_actions(Action(1, "B", 2))] == ["1I2", "1W2"]
    assert completed_actions(Action(1, "I", 2)) == (Action(1, "I", 2),)

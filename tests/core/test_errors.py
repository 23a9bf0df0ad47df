from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core import errors
from closeranks.core.errors import (
    CheckpointError,
    CloseranksError,
    ConfigError,
    DataError,
    Interrupted,
    ModelError,
    Problem,
    RunFailed,
    SetupError,
    UserError,
    decode,
    encode,
)

KINDS = [CloseranksError, UserError, ModelError, DataError, CheckpointError, SetupError, RunFailed, Interrupted]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("it broke"), "it broke."),
        (UserError("it broke."), "it broke."),
        (UserError("it broke", "Mend it."), "it broke. Mend it."),
        (UserError("it broke.", "Mend it."), "it broke. Mend it."),
        (DataError("it broke", "Mend it.", rank=0, step=3), "it broke (rank 0, step 3). Mend it."),
        (DataError("it broke", step=3), "it broke (step 3)."),
        (RunFailed("the whole report", "not shown"), "the whole report"),
    ],
)
def test_a_message_says_what_where_and_what_to_do(error: CloseranksError, text: str) -> None:
    assert str(error) == text


def test_a_users_mistake_exits_2_a_failure_1_an_interrupt_130() -> None:
    assert {kind.__name__: kind.exit_code for kind in [*KINDS, ConfigError]} == {
        "CloseranksError": 1,
        "UserError": 2,
        "ModelError": 2,
        "DataError": 2,
        "CheckpointError": 2,
        "SetupError": 2,
        "ConfigError": 2,
        "RunFailed": 1,
        "Interrupted": 130,
    }


def test_every_error_of_the_tree_is_in_its_drawing() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CloseranksError)]
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in kinds if kind.__name__ not in errors.__doc__] == []


def test_a_config_error_lists_every_problem() -> None:
    error = ConfigError([Problem("a.b", "it is odd", "Mend it.", "job.toml:3"), Problem("c", "it is even")])
    assert str(error) == "2 problems in the job:\n  a.b [job.toml:3]: it is odd. Mend it.\n  c: it is even."
    assert str(ConfigError([Problem("c", "it is even")])) == "1 problem in the job:\n  c: it is even."


TEXT = st.text(max_size=20)
PLACE = st.none() | st.integers(0, 9)


@given(kind=st.sampled_from(KINDS), what=TEXT, fix=TEXT, rank=PLACE, step=PLACE)
def test_an_error_survives_the_wire(
    kind: type[CloseranksError], what: str, fix: str, rank: int | None, step: int | None
) -> None:
    error = kind(what, fix, rank=rank, step=step)
    back = decode(json.loads(json.dumps(encode(error))))
    assert type(back) is kind
    assert (back.what, back.fix, back.rank, back.step) == (what, fix, rank, step)
    assert str(back) == str(error)


@given(st.lists(st.builds(Problem, TEXT, TEXT, TEXT, TEXT), max_size=3))
def test_problems_survive_the_wire(problems: list[Problem]) -> None:
    back = decode(json.loads(json.dumps(encode(ConfigError(problems)))))
    assert isinstance(back, ConfigError)
    assert back.problems == tuple(problems)


def test_a_kind_of_another_version_becomes_the_root() -> None:
    class Odd(DataError): ...

    assert encode(Odd("x"))["kind"] == "CloseranksError"
    assert type(decode({"kind": "FromTheFuture", "what": "x"})) is CloseranksError

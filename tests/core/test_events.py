from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core import events
from closeranks.core.events import Event, Saved, StepDone, Warned, decode, encode

KINDS = [
    kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]


def test_every_event_has_a_name_of_its_own() -> None:
    assert len(KINDS) >= 7
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_an_event_survives_its_json_line(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(st.builds(kind, **{field.name: _values(str(field.type)) for field in fields(kind)}))
    line = json.loads(json.dumps(encode(event)))
    assert next(iter(line)) == "event"
    assert decode(line) == event


def _values(annotation: str) -> st.SearchStrategy[Any]:
    number = st.floats(allow_nan=False, allow_infinity=False)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(-(2**63), 2**63 - 1),
        "float": number,
        "bool": st.booleans(),
        "str": st.text(max_size=5),
        "float | None": st.none() | number,
        "int | None": st.none() | st.integers(-(2**63), 2**63 - 1),
        "list[int]": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
        "list[str]": st.lists(st.text(max_size=3), max_size=3),
        "dict[str, int]": st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**63 - 1), max_size=2),
        "dict[str, float]": st.dictionaries(st.text(max_size=3), number, max_size=2),
        "dict[str, str]": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    }
    return plain[annotation]


def test_a_reader_ignores_what_a_newer_version_added() -> None:
    assert decode({"event": "step", "step": 3, "colour": "red", "at": 1.5, "rank": 0}) == StepDone(step=3)
    assert decode({"event": "from_the_future"}) is None
    assert decode({}) is None


def test_a_missing_field_takes_its_default() -> None:
    assert decode({"event": "saved"}) == Saved()
    assert decode({"event": "warning", "what": "x"}) == Warned(what="x", step=None)


def test_default_dicts_are_not_shared() -> None:
    assert StepDone().metrics is not StepDone().metrics


@pytest.mark.parametrize(
    "fields",
    [{"step": "3"}, {"step": None}, {"step": 2**63}, {"loss": "x"}, {"metrics": {"a": None}}, {"taken": 1}],
    ids=str,
)
def test_a_line_with_a_value_of_another_type_is_none_of_ours(fields: dict[str, Any]) -> None:
    assert decode({"event": "step", **fields}) is None

"""How are values that are no tensors kept without a pickle?"""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.dcp.values import decode, encode
from closeranks.core.errors import CheckpointError

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(alphabet=st.characters(codec="utf-8"))
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(alphabet="ab"), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value), *map(types, value)]
    return type(value)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    text = json.dumps(encode(value, "x"), allow_nan=False, ensure_ascii=False).encode()
    found = decode(json.loads(text))
    assert found == value
    assert types(found) == types(value)


def test_what_is_no_number_survives() -> None:
    assert math.isnan(decode(encode(math.nan, "x")))


class Odd(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), torch.float32, {1, 2}, b"raw", Odd(), [object()]])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'optimizer\.rule' holds a .*, which is not pickled"):
        encode(value, "optimizer.rule")


def test_text_that_is_not_unicode_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'a' holds text that is not Unicode"):
        encode("\ud800", "a")

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field, ValidationError

from closeranks.core.config.table import ConfigTable


class Inner(ConfigTable):
    size: int = 1
    """How large."""


class Outer(ConfigTable):
    flag: bool = False
    count: int = Field(default=1, ge=0)
    rate: float | None = 0.5
    pair: tuple[float, ...] = ()
    either: int | float = 1
    names: dict[str, int] = Field(default_factory=dict)
    inner: Inner = Inner()


@pytest.mark.parametrize(
    "values",
    [
        {"flag": 1},
        {"flag": "true"},
        {"count": True},
        {"count": "1"},
        {"count": 1.0},
        {"rate": "0.5"},
        {"rate": True},
        {"pair": ["1"]},
        {"pair": [True]},
        {"either": True},
        {"either": "1"},
        {"names": {"a": "1"}},
        {"inner": {"size": True}},
        {"inner": {"sise": 1}},
        {"colour": 1},
    ],
    ids=str,
)
def test_no_value_is_quietly_turned_into_another_type(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Outer(**values)


def test_what_toml_can_say_is_taken() -> None:
    table = Outer(rate=1, pair=[1, 2.5], either=3, inner={"size": 2})  # type: ignore[arg-type]
    assert table == Outer(rate=1.0, pair=(1.0, 2.5), either=3, inner=Inner(size=2))
    assert isinstance(table.rate, float)
    assert isinstance(table.either, int)


def test_a_default_that_looks_like_a_schema_is_left_alone() -> None:
    class Odd(ConfigTable):
        value: dict[str, Any] = Field(default={"type": "int"})

    assert Odd().value == {"type": "int"}


def test_docstrings_become_help() -> None:
    assert Inner.model_fields["size"].description == "How large."


def test_a_table_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Inner().size = 2  # type: ignore[misc]


class Named(ConfigTable):
    path: str = ""
    hooks: tuple[str, ...] = ()
    args: dict[str, str] = Field(default_factory=dict)


@pytest.mark.parametrize("text", ["a\0b", "\x1b[2J", "a\rb", "\x7f"])
def test_no_text_holds_what_a_path_or_a_terminal_cannot(text: str) -> None:
    for values in ({"path": text}, {"hooks": [text]}):
        with pytest.raises(ValidationError, match="it holds"):
            Named.model_validate(values)
    Named(path="two\nlines and a\ttab, é ß 日本", args={"separator": text})

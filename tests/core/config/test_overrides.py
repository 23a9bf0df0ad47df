from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.config.overrides import Override, parse_overrides, parse_value, split_pairs
from closeranks.core.config.toml.writer import format_value
from tests.core.config.toml.test_writer import TEXT, VALUE

from .job_shapes import Job


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200", 200),
        ("true", True),
        ("3e-4", 3e-4),
        ("[0.9,0.99]", [0.9, 0.99]),
        ("8b", "8b"),
        ("bf16", "bf16"),
        ("True", "True"),
        ("", ""),
        ("a b", "a b"),
        ('"quoted"', "quoted"),
        (" 5 ", 5),
        ("#1", "#1"),
        ("1\nother = 2", "1\nother = 2"),
        ('[{pattern="*.bias", lr_scale=2}]', [{"pattern": "*.bias", "lr_scale": 2}]),
        ("inf", float("inf")),
    ],
)
def test_the_right_side_is_toml_or_plain_text(text: str, value: Any) -> None:
    assert parse_value(text) == value


@given(VALUE)
def test_every_toml_value_can_be_given(value: Any) -> None:
    assert parse_value(format_value(value)) == value


@given(TEXT)
def test_text_that_is_not_toml_is_never_changed(text: str) -> None:
    value = parse_value(text)
    if isinstance(value, str):
        assert value in (text.strip(), text.strip()[1:-1]) or text.strip()[:1] in ("'", '"')


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("data=2 tensor=2", ["data=2", "tensor=2"]),
        ("data=2, tensor=2", ["data=2", "tensor=2"]),
        ("data = 2  tensor = 2", ["data = 2", "tensor = 2"]),
        ("betas=[0.9, 0.99] lr=1", ["betas=[0.9, 0.99]", "lr=1"]),
        ('groups=[{pattern="a b=c", lr_scale=2}] lr=1', ['groups=[{pattern="a b=c", lr_scale=2}]', "lr=1"]),
        ("name='x y=z' seed=1", ["name='x y=z'", "seed=1"]),
        ("a.b=1 c=2", ["a.b=1", "c=2"]),
        ("data", ["data"]),
        ("", []),
    ],
)
def test_pairs_are_cut_outside_quotes_and_brackets(text: str, pairs: list[str]) -> None:
    assert split_pairs(text) == pairs


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUE, min_size=1, max_size=4))
def test_a_table_of_any_values_can_be_given_as_pairs(values: dict[str, Any]) -> None:
    text = "model.args=" + " ".join(f"{key}={format_value(value)}" for key, value in values.items())
    overrides, problems = parse_overrides(Job, [text])
    assert not problems
    assert overrides == [Override(("model", "args", key), value) for key, value in values.items()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=200", [(("train", "steps"), 200)]),
        ("layout=data=2 tensor=2", [(("layout", "data"), 2), (("layout", "tensor"), 2)]),
        ('layout="data=2 tensor=2"', [(("layout", "data"), 2), (("layout", "tensor"), 2)]),
        ("layout={data=2}", [(("layout",), {"data": 2})]),
        ("model=preset=8b dropout=0.1", [(("model", "preset"), "8b"), (("model", "dropout"), 0.1)]),
        ("optim=schedule.warmup=3 lr=1", [(("optim", "schedule", "warmup"), 3), (("optim", "lr"), 1)]),
        ("run.name=7", [(("run", "name"), "7")]),
        ("run.name=true", [(("run", "name"), "true")]),
        ("run.name=2030-01-31", [(("run", "name"), "2030-01-31")]),
        ("run.name=a=b", [(("run", "name"), "a=b")]),
        ('run.name="7"', [(("run", "name"), "7")]),
        ("model.args.x=7", [(("model", "args", "x"), 7)]),
        ('model.args."a.b"=7', [(("model", "args", "a.b"), 7)]),
        ("nobody.knows=7", [(("nobody", "knows"), 7)]),
        (" train.steps = 5 ", [(("train", "steps"), 5)]),
    ],
)
def test_what_an_override_sets(text: str, expected: list[tuple[tuple[str, ...], Any]]) -> None:
    overrides, problems = parse_overrides(Job, [text])
    assert not problems
    assert [(override.parts, override.value) for override in overrides] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps", "train.steps [command line]: there is no `=` in it. Write train.steps=1."),
        ("optim.lr", "optim.lr [command line]: there is no `=` in it. Write optim.lr=0.001."),
        ("nonsense", "nonsense [command line]: there is no `=` in it. Write nonsense=VALUE."),
        ("", "(empty) [command line]: there is no `=` in it. Write table.key=VALUE."),
        (
            "=5",
            "=5 [command line]: there is no key before `=`. Write table.key=VALUE, such as train.steps=200.",
        ),
        (
            "a b=5",
            "a b=5 [command line]: `a b` is not a key. Write table.key=VALUE, such as train.steps=200.",
        ),
        (
            "train.steps.x=5",
            "train.steps.x [command line]: train.steps holds a whole number, so there is no `x` in it. "
            "Write train.steps=1.",
        ),
        ("--train.steps=5", "--train.steps=5 [command line]: a setting of the job has no dashes. Write train.steps=5."),
        (
            "model=8b",
            "model [command line]: it is a table, and `8b` is not a list of key=value pairs. "
            'Write model.name=VALUE, or model="name=VALUE key=VALUE".',
        ),
        (
            "layout=",
            "layout [command line]: it is a table, and nothing is set. "
            'Write layout.data=VALUE, or layout="data=VALUE key=VALUE".',
        ),
        ("~train.stps", "~train.stps [command line]: no such key. Did you mean 'steps'?"),
        ("~train.steps=3", "~train.steps=3 [command line]: a key that is unset has no value. Write ~train.steps."),
        ("~", "~ [command line]: there is no key after `~`. Write ~table.key."),
        ("~train.steps.x", "~train.steps.x [command line]: no such key. Leave it out."),
        ("~run.\udcff", "'~run.\\udcff' [command line]: it is not UTF-8 text. Type it again by hand."),
        ("run.name=\udcff", "'run.name=\\udcff' [command line]: it is not UTF-8 text. Type it again by hand."),
    ],
)
def test_an_override_that_cannot_be_understood(text: str, message: str) -> None:
    overrides, problems = parse_overrides(Job, [text])
    assert [str(problem) for problem in problems] == [message]
    assert not overrides


def test_all_bad_overrides_are_reported_and_the_good_ones_kept() -> None:
    overrides, problems = parse_overrides(Job, ["x", "train.steps=3", "=4"])
    assert len(problems) == 2
    assert overrides == [Override(("train", "steps"), 3)]

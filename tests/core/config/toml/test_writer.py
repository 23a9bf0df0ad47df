from __future__ import annotations

import math
import tomllib
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.core.config.load import load
from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.writer import dotted_key, dump_toml, format_value
from closeranks.core.errors import UserError
from tests.core.config.job_shapes import (
    DigitsConfig,
    GroupConfig,
    Job,
    LayoutConfig,
    LlamaConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    UserModelConfig,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n"), max_size=12)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
SCALAR = st.one_of(st.booleans(), st.integers(), NUMBER, TEXT, st.dates(), st.times(), st.datetimes())
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)

MODELS = st.one_of(
    st.builds(LlamaConfig, preset=st.sampled_from(["tiny", "8b"]), num_layers=st.none() | st.integers(1, 99)),
    st.builds(DigitsConfig, channels=st.lists(st.integers(), max_size=3).map(tuple)),
    st.builds(
        UserModelConfig,
        name=LINE.map(lambda name: f"m:{name}"),
        args=st.dictionaries(TEXT, VALUE, max_size=3),
        metrics=st.lists(LINE, max_size=2).map(tuple),
    ),
)
GROUPS = st.builds(
    GroupConfig,
    pattern=LINE,
    lr_scale=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
    weight_decay=st.none() | NUMBER,
    frozen=st.booleans(),
)
JOBS = st.builds(
    Job,
    run=st.builds(RunConfig, name=LINE, seed=st.integers(), deterministic=st.booleans()),
    model=MODELS,
    train=st.builds(TrainConfig, steps=st.integers(1)),
    optim=st.builds(
        OptimConfig,
        betas=st.tuples(NUMBER, NUMBER),
        groups=st.lists(GROUPS, max_size=3).map(tuple),
        schedule=st.builds(ScheduleConfig, warmup=st.integers() | NUMBER),
    ),
    layout=st.builds(LayoutConfig, schedule=LINE),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=JOBS)
def test_what_is_dumped_loads_back_equal(tmp_path: Path, job: Job) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(dump_toml(job).encode())
    loaded = load(Job, path, ())
    assert loaded.value == job
    assert type(loaded.value.optim.schedule.warmup) is type(job.optim.schedule.warmup)


@given(value=VALUE)
def test_a_formatted_value_is_read_back_by_the_standard_library(value: Any) -> None:
    assert tomllib.loads(f"value = {format_value(value)}")["value"] == value


@given(parts=st.lists(TEXT, min_size=1, max_size=4))
def test_a_dotted_place_is_a_toml_key(parts: list[str]) -> None:
    node: Any = tomllib.loads(f"{dotted_key(parts)} = 0")
    for part in parts:
        node = node[part]
    assert node == 0


def test_floats_that_json_cannot_say() -> None:
    assert format_value([math.inf, -math.inf, math.nan, -0.0, 1e22, 5e-324]) == "[inf, -inf, nan, -0.0, 1e+22, 5e-324]"
    assert math.isnan(tomllib.loads(f"x = {format_value(math.nan)}")["x"])


def test_dates_paths_and_bools() -> None:
    stamp = datetime(2030, 1, 31, 1, 2, 3, tzinfo=timezone(timedelta(hours=2)))
    assert tomllib.loads(f"x = {format_value([stamp, date(2030, 1, 31), time(1, 2)])}")["x"][0] == stamp
    assert format_value([True, 1]) == "[true, 1]"
    assert format_value(PurePosixPath("a/b")) == '"a/b"'


def test_the_text_is_laid_out_for_people() -> None:
    job = Job(train=TrainConfig(steps=2), optim=OptimConfig(groups=(GroupConfig(pattern="*.bias"),)))
    text = dump_toml(job)
    assert text.startswith('[run]\nname = "run"\n')
    assert '\n[[optim.groups]]\npattern = "*.bias"\nlr_scale = 1.0\nfrozen = false\n' in text
    assert "num_layers" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


class Unsayable(ConfigTable):
    limit: int | None = 5
    args: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it


@pytest.mark.parametrize(
    ("table", "place"),
    [
        (Unsayable(limit=None), "limit"),
        (Unsayable(args={"a": {"b": None}}), "args.a.b"),
        (Unsayable(args={"a": [1, None]}), "args.a"),
        (Unsayable(args={"a": object()}), "args.a"),
        (Unsayable(args={"a": "\ud800"}), "args.a"),
        (Unsayable(args={"\ud800": 1}), "args"),
    ],
    ids=["none", "none in a table", "none in an array", "an object", "half a character", "half a key"],
)
def test_what_toml_cannot_hold_is_named_not_changed(table: Unsayable, place: str) -> None:
    with pytest.raises(UserError, match="a TOML file cannot hold") as caught:
        dump_toml(table)
    assert caught.value.what.startswith(f"{place} holds ")

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from closeranks.core.config.load import load
from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import ConfigError
from closeranks.data.config import (
    ClicksDataConfig,
    DataConfig,
    DigitsDataConfig,
    PairsDataConfig,
    TextConfig,
    UserDataConfig,
)

adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({}, TextConfig),
        ({"seq_len": 64}, TextConfig),
        ({"name": "text"}, TextConfig),
        ({"name": "digits"}, DigitsDataConfig),
        ({"name": "pairs"}, PairsDataConfig),
        ({"name": "clicks"}, ClicksDataConfig),
        ({"name": "mine.data:make", "args": {"n": 3}}, UserDataConfig),
    ],
)
def test_the_name_picks_the_variant(table: dict[str, Any], kind: type) -> None:
    config = adapter.validate_python(table)
    assert type(config) is kind
    assert (config.prefetch, config.check_finite) == (2, True)
    assert isinstance(config.seq_len, int)
    assert adapter.validate_python(config) is config
    assert adapter.validate_python(config.model_dump()) == config


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "txet"}, "Did you mean 'text'?"),
        ({"name": "zzz"}, "Known: clicks, digits"),
        ({"name": "mine:"}, "package.module:factory"),
        ({"name": "a:b", "eval": "no-colon"}, "package.module:factory"),
        ({"seq_len": 0}, "greater than or equal to 1"),
        ({"eval_fraction": 1.0}, "less than 1"),
        ({"prefetch": -1}, "greater than or equal to 0"),
        ({"pth": "x"}, "Extra inputs"),
        ({"name": "digits", "seq_len": 3}, "Extra inputs"),
    ],
)
def test_bad_tables_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(table)
    assert said in str(caught.value)


def test_every_key_is_explained() -> None:
    for kind in (TextConfig, DigitsDataConfig, PairsDataConfig, ClicksDataConfig, UserDataConfig):
        for name, field in kind.model_fields.items():
            assert field.description or name == "name", f"{kind.__name__}.{name}"


def test_reading_a_job_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, closeranks.data.config; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_share(weight: float) -> None:
    with pytest.raises(ValidationError):
        adapter.validate_python({"name": "mixture", "parts": {"a": {"weight": weight, "data": {"name": "text"}}}})


class WithData(ConfigTable):
    data: DataConfig


def test_a_key_that_ones_own_dataset_lacks_is_told_by_its_name(tmp_path: Path) -> None:
    """Not by another key with fixed choices that all kinds of data share."""
    (tmp_path / "job.toml").write_text('[data]\nname = "mymodel:ds"\npath = "x"\n')
    with pytest.raises(ConfigError, match=r"data\.path .*: no such key where data\.name is mymodel:ds\. "):
        load(WithData, tmp_path / "job.toml", ())

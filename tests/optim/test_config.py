from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from closeranks.optim.config import GroupConfig, LossScaleConfig, OptimConfig, ScheduleConfig


def test_a_table_of_a_job_file() -> None:
    table = tomllib.loads("""
        name = "sgd"
        lr = 0.1
        schedule = {name = "wsd", warmup = 10}
        [[groups]]
        pattern = "head.*"
        lr_scale = 0.5
        [[groups]]
        pattern = "*"
        frozen = true
    """)
    config = OptimConfig.model_validate(table)
    assert config.groups == (GroupConfig(pattern="head.*", lr_scale=0.5), GroupConfig(pattern="*", frozen=True))
    assert (config.schedule.name, config.schedule.warmup, config.betas) == ("wsd", 10, (0.9, 0.95))
    assert OptimConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "adam"}, "'adamw', 'sgd', 'lars' or 'lamb'"),
        ({"lr": -1.0}, "greater than or equal to 0"),
        ({"lr": float("nan")}, "finite number"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"clip": -1}, "greater than or equal to 0"),
        ({"name": "sgd", "nesterov": True, "momentum": 0.0}, "nesterov needs momentum"),
        ({"schedule": {"warmup": 1.5}}, "neither a number of steps nor a fraction"),
        ({"schedule": {"min_ratio": 1.5}}, "less than or equal to 1"),
        ({"groups": [{"patern": "*"}]}, "Extra inputs"),
        ({"loss_scale": {"interval": 0}}, "greater than or equal to 1"),
    ],
)
def test_bad_tables_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OptimConfig.model_validate(table)
    assert said in str(caught.value)


def test_every_key_is_explained() -> None:
    for kind in (OptimConfig, GroupConfig, ScheduleConfig, LossScaleConfig):
        for name, field in kind.model_fields.items():
            assert field.description or hasattr(field.annotation, "model_fields"), f"{kind.__name__}.{name}"


def test_reading_a_job_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, closeranks.optim.config; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from closeranks.optim.config import OptimConfig, ScheduleConfig
from closeranks.optim.lr_scaling import describe_lr_scaling, lr_scaling_factor, lr_scaling_warning, with_scaled_lr


def config(**keys: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 0.1, "scaling": "linear", "base_batch": 32, **keys})


@pytest.mark.parametrize(
    ("scaling", "batch", "factor"),
    [("linear", 512, 16.0), ("sqrt", 512, 4.0), ("linear", 32, 1.0), ("sqrt", 32, 1.0), ("linear", 8, 0.25)],
)
def test_the_rules(scaling: str, batch: int, factor: float) -> None:
    assert lr_scaling_factor(config(scaling=scaling), batch) == factor
    assert with_scaled_lr(config(scaling=scaling), batch).lr == pytest.approx(0.1 * factor)


def test_without_a_rule_the_rate_stays() -> None:
    plain = OptimConfig(lr=0.1)
    assert with_scaled_lr(plain, 10_000) == plain
    assert describe_lr_scaling(plain, 10_000, 100) == lr_scaling_warning(plain, 10_000, 100) == ""


def test_the_rest_of_the_settings_stay() -> None:
    before = config(name="lamb", schedule=ScheduleConfig(warmup=7))
    after = with_scaled_lr(before, 64)
    assert after.model_dump(exclude={"lr"}) == before.model_dump(exclude={"lr"})


def test_it_is_said_in_one_line() -> None:
    line = describe_lr_scaling(config(schedule=ScheduleConfig(warmup=0.1)), 512, 200)
    assert line == (
        "learning rate 1.6 = 0.1 x 16 (linear in 512 samples a step, tuned for 32), reached after 20 steps of warm-up"
    )
    assert describe_lr_scaling(config(schedule=ScheduleConfig(warmup=0)), 512, 200).endswith(
        "tuned for 32), from the first step"
    )


def test_a_raised_rate_without_warm_up_is_warned_of() -> None:
    assert "Set optim.schedule.warmup" in lr_scaling_warning(config(schedule=ScheduleConfig(warmup=0)), 512, 200)
    assert lr_scaling_warning(config(schedule=ScheduleConfig(warmup=0.05)), 512, 200) == ""
    assert lr_scaling_warning(config(schedule=ScheduleConfig(warmup=0)), 32, 200) == ""


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"base_batch": None}, "Set optim.base_batch"),
        ({"scaling": "none"}, "Set optim.scaling"),
        ({"base_batch": 0}, "greater than or equal to 1"),
        ({"scaling": "cubic"}, "'none', 'linear' or 'sqrt'"),
        ({"name": "lars", "nesterov": True}, "lars has no nesterov"),
        ({"trust": 0.0}, "greater than 0"),
    ],
)
def test_bad_combinations_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**table)
    assert said in str(caught.value)

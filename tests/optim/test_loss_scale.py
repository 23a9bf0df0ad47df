from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import CheckpointError
from closeranks.optim.config import LossScaleConfig
from closeranks.optim.loss_scale import LossScale

CPU = torch.device("cpu")


def scale(enabled: bool = True, **keys: Any) -> LossScale:
    return LossScale(LossScaleConfig(**keys), enabled, CPU)


def test_an_overflow_halves_and_good_steps_double() -> None:
    loss_scale = scale(init=1024.0, interval=3)
    course = []
    for ok in (1, 1, 1, 1, 0, 1, 1, 1, 1):
        loss_scale.update(torch.tensor(float(ok)))
        course.append(loss_scale.scale.item())
    assert course == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048, 2048]


def test_never_falls_below_the_minimum() -> None:
    loss_scale = scale(init=4.0, minimum=1.5)
    for _ in range(5):
        loss_scale.update(torch.tensor(0.0))
    assert loss_scale.scale.item() == 1.5


def test_disabled_it_stays_one() -> None:
    loss_scale = scale(enabled=False, interval=1)
    for ok in (1.0, 0.0, 1.0):
        loss_scale.update(torch.tensor(ok))
    assert loss_scale.scale.item() == 1.0
    assert loss_scale.state() == {}


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restored_scale_goes_on_as_the_first(before: list[bool], after: list[bool]) -> None:
    keys: dict[str, Any] = {"init": 64.0, "interval": 3}
    first, second = scale(**keys), scale(**keys)
    for ok in before:
        first.update(torch.tensor(float(ok)))
    second.load_state({key: value.clone() for key, value in first.state().items()})
    for ok in after:
        first.update(torch.tensor(float(ok)))
        second.update(torch.tensor(float(ok)))
        assert torch.equal(first.scale, second.scale)


def test_a_state_is_loaded_into_place() -> None:
    loss_scale = scale(init=8.0)
    held = loss_scale.scale
    loss_scale.load_state({"scale": torch.tensor(32.0), "num_good": torch.tensor(5, dtype=torch.int32)})
    assert held.item() == 32.0


def test_a_change_of_precision_starts_anew() -> None:
    half, full = scale(init=256.0), scale(enabled=False)
    full.load_state(half.state())
    assert full.scale.item() == 1.0
    half.load_state(full.state())
    assert half.scale.item() == 256.0


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="keys"):
        scale().load_state({"scale": torch.tensor(1.0)})


@pytest.mark.gpu
def test_on_the_gpu_without_a_host_sync() -> None:
    device = torch.device("cuda")
    loss_scale = LossScale(LossScaleConfig(init=8.0, interval=1), True, device)
    verdicts = [torch.tensor(value, device=device) for value in (1.0, 0.0, 0.0)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ok in verdicts:
            loss_scale.update(ok)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss_scale.scale.item() == 4.0

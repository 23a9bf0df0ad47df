from __future__ import annotations

import pytest

from closeranks.core.events import StepDone
from closeranks.telemetry.reports.data_wait import data_wait


def steps(**spent: float) -> list[StepDone]:
    return [StepDone(step=number, seconds=0.1, **spent) for number in range(1, 5)]


def test_a_share_alone_where_nothing_waits() -> None:
    assert data_wait(steps(data_wait_s=0.001, data_read_s=0.01)) == "1.0% of the steps' time"


@pytest.mark.parametrize("stage", ["read", "fetch", "decode", "collate"])
def test_the_slowest_stage_is_named(stage: str) -> None:
    spent = {f"data_{name}_s": 0.01 for name in ("read", "fetch", "decode", "collate")} | {f"data_{stage}_s": 0.08}
    said = data_wait(steps(data_wait_s=0.04, **spent))
    assert said.startswith("40.0% of the steps' time: ")
    assert f"{stage.removesuffix('e')}ing takes longest" in said
    assert "80 ms" in said


def test_nothing_is_said_of_no_time() -> None:
    assert data_wait([]) == ""

"""The doctor on real runs: each planted cause is found, with the change to make."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_causes import HEALTHY, PLANTED, PLANTED_ON_GPU, Planted
from doctor_places import PlaceUnavailable

from doctor import is_planted, run_job, run_planted


@pytest.mark.world
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_cause_is_found(tmp_path: Path, planted: Planted) -> None:
    """Among the findings: on a machine that is busy with other things, something else may weigh more."""
    try:
        diagnosis = run_planted(planted, tmp_path / "run")
    except PlaceUnavailable as error:
        pytest.skip(str(error))
    assert any(is_planted(planted, one) for one in diagnosis.findings), diagnosis
    assert diagnosis.failed_rules == ()


@pytest.mark.world
def test_a_healthy_run_has_no_error(tmp_path: Path) -> None:
    job, overrides, num_workers = HEALTHY[0]
    diagnosis = run_job(tmp_path / "run", [*job, *overrides], num_workers)
    assert not [one for one in diagnosis.findings if one.is_error], diagnosis
    assert diagnosis.missing == ()


def test_there_are_enough_of_them() -> None:
    assert len({one.name for one in PLANTED}) == len(PLANTED) >= 24
    assert len({one.name for one in PLANTED_ON_GPU}) == len(PLANTED_ON_GPU) >= 6

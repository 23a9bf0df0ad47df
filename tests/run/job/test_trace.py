"""A job's own module is traced with a sample of its own data, on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import load_job

JOB = Path(__file__).parents[3] / "examples" / "own_model" / "job.toml"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOB.parent))


def test_a_job_of_an_own_model_is_traced_where_it_is_asked_for() -> None:
    job = load_job(JOB, []).value
    found = describe_job(job, traces=True)
    assert found.trace is not None
    assert [unit.name for unit in found.trace.units if unit.name] == [unit.name for unit in found.structure.units][:-1]
    # 8 to 64 to 64 to 2: forward and the weights' gradients, and the gradients of all inputs but the first
    assert found.trace.flops_per_sample == 2 * (2 * (8 * 64) + 3 * (64 * 64 + 64 * 2))
    assert describe_job(job).trace is None


def test_data_that_cannot_be_read_is_said() -> None:
    job = load_job(JOB, ["data.args.num_samples=0"]).value
    trace = describe_job(job, traces=True).trace
    assert trace is not None
    assert trace.flops_per_sample == 0
    assert "no sample of its data could be read" in trace.untraced[0]
    assert trace.num_params > 0

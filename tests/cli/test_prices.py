"""``telemetry.prices`` is checked before anything starts, and found beside the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.run.job.job import load_job
from closeranks.run.job.paths import resolve_paths
from tests.cli.calling import call
from tests.cli.commands import TINY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "telemetry.prices: there is no 'prices.toml' in the working folder"),
        ("[[price]]\ndevice = 'H100'\n", "the prices prices.toml cannot be used: the price of H100 needs per_hour"),
        ("[[price", "the prices prices.toml cannot be used: "),
    ],
)
def test_a_table_that_cannot_be_used_starts_nothing(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "prices.toml").write_text(text)
    done = call("train", TINY, "telemetry.prices=prices.toml", cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_it_is_found_beside_the_job_file(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    job_file.write_text(Path(TINY).read_text())
    (tmp_path / "prices.toml").write_text("")
    job = load_job(job_file, ["telemetry.prices=prices.toml"]).value
    assert resolve_paths(job, job_file).telemetry.prices == str(tmp_path / "prices.toml")

"""A whole calibration of a CPU in its shortest form, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.facts.calibration import load_calibration
from closeranks.lab.calibrate import workers
from closeranks.lab.calibrate.calibrate import worker_counts
from tests.cli.calling import call
from tests.cli.commands import ROOT

TINY = ROOT / "examples" / "tiny.toml"


@pytest.mark.world
def test_everything_of_a_cpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_TURN_S", 0.01)
    path = tmp_path / "mine.json"
    found = call("plan", "calibrate", TINY, "--device", "cpu", "--seconds", 2, "--out", path, cwd=tmp_path)
    assert found.code == 0, found.err
    assert str(path) in found.out
    calibration = load_calibration(path)
    assert calibration.kind == "cpu"
    assert calibration.product_s(192, 128, 128, "fp32")
    for name in ("attention", "memory_passes", "optimizer", "slowdowns", "collectives"):
        assert getattr(calibration, name), name
    assert {one.operation for one in calibration.collectives} == set(workers.OPERATIONS)
    assert calibration.disk_bytes_per_s
    assert list(tmp_path.iterdir()) == [path], "the file that the disk was measured with is gone"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--device", "tpu"], "'tpu' is no device"),
        (["--out", "nowhere/mine.json"], "there is no folder nowhere"),
        (["none.toml"], "none.toml"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], what: str) -> None:
    found = call("plan", "calibrate", *arguments)
    assert found.code == 2
    assert what in found.err


def test_workers_of_a_host_up_to_two_for_each_core() -> None:
    assert worker_counts(1) == (2,)
    assert worker_counts(2) == (2, 4)
    assert worker_counts(16) == (2, 8)

from __future__ import annotations

from micro_batch import BATCHES

from tests.benchmarks.scripts import run_script


def test_it_runs() -> None:
    last = run_script("micro_batch.py", "--rounds", "1", "--steps", "3")
    assert list(last["figures"]) == [f"batch_{batch}" for batch in BATCHES]
    for one in last["figures"].values():
        assert one["default"] == 2 * one["eighth"]
        assert one["median"] > 0

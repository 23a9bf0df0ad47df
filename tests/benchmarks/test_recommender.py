"""The benchmark of tables that servers keep, on few samples."""

from __future__ import annotations

import os

import pytest

from tests.benchmarks.scripts import run_script

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bytes_are_proportional_to_touched_rows_and_the_auc_is_that_of_a_dense_table() -> None:
    told = run_script("recommender.py", "--only", "auc", "bytes", "--samples", "20000", timeout_s=550)
    assert told["met"], told
    assert told["figures"]["auc"]["dense"] > told["figures"]["auc"]["untrained"] + 0.05, "something was learned"

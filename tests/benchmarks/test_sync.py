from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from closeranks.lab.compare.comparison_plan import make_plan
from closeranks.lab.compare.config import load_compare
from closeranks.lab.compare.namespaces import unavailable_reason
from closeranks.lab.compare.result_table import RunStat, SettingRow
from sync import PARTS, judge, tell, tell_hosts
from tests.benchmarks.conftest import BENCHMARKS
from tests.benchmarks.scripts import run_script

LINK = {
    "plain": {"times_as_fast": [1.0, 1.0]},
    "1-bit": {"times_as_fast": [5.5, 6.0]},
    "int8": {"times_as_fast": [3.0, 3.0]},
    "DiLoCo, every 20": {"times_as_fast": [5.1, 5.2]},
}
GOOD: dict[str, Any] = {
    "slow": LINK,
    "fast": {name: {} for name in LINK},
    "bytes": {name: {"times_fewer_bytes": 60.0} for name in ("1-bit", "PowerSGD, rank 4", "top-k, 1%")},
    "hosts": {
        "flat": {"rate_low": 0.5, "rate_high": 0.55, "times_computed": 1.05},
        "hierarchical": {"rate_low": 0.7, "rate_high": 0.75, "times_computed": 1.05},
    },
}


def test_what_meets_every_goal_is_met() -> None:
    assert judge(GOOD)


@pytest.mark.parametrize(
    ("part", "row", "changed"),
    [
        ("slow", "1-bit", {"times_as_fast": [4.9, 6.0]}),
        ("slow", "1-bit", {}),
        ("slow", "DiLoCo, every 20", {"times_as_fast": [4.0, 6.0]}),
        ("bytes", "PowerSGD, rank 4", {"times_fewer_bytes": 9.9}),
        ("bytes", "top-k, 1%", {"times_fewer_bytes": 49.0}),
        ("hosts", "hierarchical", {"rate_low": 0.54, "rate_high": 0.75, "times_computed": 1.0}),
        ("hosts", "flat", {"rate_low": 0.5, "rate_high": 0.55, "times_computed": 1.2}),
    ],
)
def test_each_shortfall_is_seen(part: str, row: str, changed: dict[str, Any]) -> None:
    figures = deepcopy(GOOD)
    figures[part][row] = changed
    assert not judge(figures)


def test_what_was_not_run_proves_nothing() -> None:
    assert not judge({part: GOOD[part] for part in ("slow", "bytes", "hosts")})


def stat(*values: float) -> RunStat:
    found = RunStat.of(values)
    assert found is not None
    return found


def test_bytes_of_hosts_stand_beside_the_formula() -> None:
    """A million values of four bytes; the interfaces counted those of both hosts."""
    flat = SettingRow("flat", 4, 2, 2, steps_per_s=stat(0.5, 0.7), bytes_per_step=stat(12.6e6), bytes_ratio=1.0)
    two = SettingRow("hierarchical", 4, 2, 2, steps_per_s=stat(0.8, 0.9), bytes_per_step=stat(8.4e6), bytes_ratio=2 / 3)
    told = tell_hosts([flat, two], 1_000_000)
    assert (told["flat"]["mb_computed"], told["flat"]["times_computed"]) == (6.0, 1.05)
    assert (told["hierarchical"]["mb_computed"], told["hierarchical"]["times_computed"]) == (4.0, 1.05)
    assert (told["flat"]["rate_low"], told["flat"]["rate_high"]) == (0.5, 0.7)


def test_a_row_that_did_not_reach_the_loss_has_no_gain() -> None:
    assert tell(SettingRow("topk", 2, 2, 2, steps_per_s=stat(2.0))) == {"steps_per_s": 2.0}


@pytest.mark.parametrize("part", PARTS)
def test_every_comparison_can_be_run(part: str) -> None:
    file, words = PARTS[part]
    path = BENCHMARKS / file
    plan = make_plan(load_compare(path, words), path)
    assert len({run.key for run in plan.runs}) == len(plan.runs)


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.timeout(420)  # six runs of four workers
def test_it_runs(tmp_path: Path) -> None:
    if reason := unavailable_reason(shaped=True):
        pytest.skip(reason)
    found = run_script("sync.py", "--only", "hosts", "--steps", "4", "--folder", str(tmp_path), timeout_s=400)
    assert found["met"] is False, "four steps prove nothing"
    assert set(found["figures"]["hosts"]) == {"flat", "hierarchical"}
    assert found["figures"]["hosts"]["hierarchical"]["mb_a_host"] < found["figures"]["hosts"]["flat"]["mb_a_host"]

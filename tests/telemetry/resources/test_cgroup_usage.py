"""A real CPU limit throttles a process, and shows; groups of both versions are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.elastic.faults.cgroups import CPU, ControlGroup, find_cgroup_parent
from closeranks.telemetry.resources.cgroup_usage import cpu_limit
from tests.elastic.faults.worker_processes import has
from tests.telemetry.resources.own_process import SPIN, read_twice


def group(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_limit_is_read_in_both_versions(tmp_path: Path) -> None:
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    for folder in (one, two, none):
        folder.mkdir()
    assert cpu_limit(group(one, cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")) == 0.5
    assert cpu_limit(group(two, cpu__max="250000 100000\n")) == 2.5
    assert cpu_limit(none) is None
    assert cpu_limit(group(one, cpu__cfs_quota_us="-1\n")) is None
    assert cpu_limit(group(two, cpu__max="max 100000\n")) is None


@has(CPU)
@pytest.mark.world
def test_a_throttled_process_says_so_and_a_free_one_does_not() -> None:
    cgroup = ControlGroup(find_cgroup_parent(CPU))
    try:
        cgroup.limit_cpu(0.2)
        limited = read_twice(SPIN.format(seconds=0.6), cgroup.add)
    finally:
        cgroup.remove()
    free = read_twice(SPIN.format(seconds=0.6))
    assert limited["cgroup"]["limit_cpus"] == pytest.approx(0.2)
    assert limited["cgroup"]["throttled_periods"] > 5
    assert limited["cgroup"]["throttled_periods"] <= limited["cgroup"]["periods"]
    assert limited["cgroup"]["throttled_s"] > 0.1
    assert limited["cgroup"].get("cpus", 0.2) < 0.3
    assert limited["process"]["cpus"] < 0.3
    assert limited["process"]["run_wait_share"] > 0.3, "a throttled thread is runnable"
    assert free["cgroup"].get("throttled_periods", 0) == 0

"""What does the control group of this process use, and is it throttled? Control groups of version 1 and 2.

A limit may be set on any group above the process's own (a container's pod), so all of them are read: the lowest limit
counts, and throttling by any of them. The root group of a host has the host's figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from closeranks.core.system.cgroup_hierarchy import CgroupHierarchy, hierarchies
from closeranks.telemetry.resources.proc_files import numbers_of, text_of
from closeranks.telemetry.resources.reading import Reading


def read_cgroup() -> Reading:
    try:
        for hierarchy in hierarchies("cpu"):
            if groups := [path for path in hierarchy.upwards() if _is_limitable(path)]:
                return _read(groups, _used_s(hierarchy, groups[0]))
    except OSError:  # no control groups here
        pass
    return Reading()


def _read(groups: Sequence[Path], used_s: float | None) -> Reading:
    counted = [numbers_of(group / "cpu.stat") for group in groups]
    totals = {
        "periods": sum(stat.get("nr_periods", 0) for stat in counted),
        "throttled_periods": sum(stat.get("nr_throttled", 0) for stat in counted),
        "throttled_s": sum(
            stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9 for stat in counted
        ),
    }
    limits = [limit for group in groups if (limit := cpu_limit(group)) is not None]
    levels = {"limit_cpus": round(min(limits), 4)} if limits else {}
    return Reading(totals, {} if used_s is None else {"cpus": used_s}, levels=levels, subject=str(groups[0]))


def _is_limitable(group: Path) -> bool:
    """With version 2 the root group of a host is not."""
    return (group / "cpu.max").exists() or (group / "cpu.cfs_quota_us").exists()


def cpu_limit(group: Path) -> float | None:
    """The number of processors that a group may use; None: no limit."""
    quota, _, period = text_of(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (text_of(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _used_s(hierarchy: CgroupHierarchy, group: Path) -> float | None:
    """Processor seconds of the process's own group. Version 1 counts them in another hierarchy, in which the process
    may be in another group: then they say nothing."""
    if hierarchy.version == 2:
        found = numbers_of(group / "cpu.stat").get("usage_usec")
        return None if found is None else found / 1e6
    same = [one for one in hierarchies("cpuacct") if one.version == 1 and one.own == hierarchy.own]
    text = text_of(next(same[0].upwards()) / "cpuacct.usage").strip() if same else ""
    return int(text) / 1e9 if text.isdecimal() else None

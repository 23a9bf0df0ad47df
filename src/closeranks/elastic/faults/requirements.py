"""Checks which kinds of faults are possible on this machine, and why the others are not.

Called before a campaign starts: what is missing is reported then, not in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from closeranks.elastic.faults.cgroups import CPU, MEMORY, CgroupControl, CgroupUnavailable, find_cgroup_parent
from closeranks.elastic.faults.disk import mount_problem
from closeranks.elastic.faults.processes import pidfd_getfd_problem


def unavailable_kinds(kinds: Iterable[str]) -> dict[str, str]:
    """The kinds among these that are not possible here, each with the reason."""
    reasons = {kind: _ASK[kind]() for kind in dict.fromkeys(kinds) if kind in _ASK}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _without(need: CgroupControl) -> Callable[[], str]:
    def ask() -> str:
        try:
            find_cgroup_parent(need)
        except CgroupUnavailable as lack:
            return str(lack)
        return ""

    return ask


_ASK: dict[str, Callable[[], str]] = {
    "exception": pidfd_getfd_problem,
    "slow": _without(CPU),
    "oom": _without(MEMORY),
    "diskfull": mount_problem,
}

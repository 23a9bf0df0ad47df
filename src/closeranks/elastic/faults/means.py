"""Checks which kinds of faults are possible on this machine, and why the others are not.

Called before a campaign starts: what is missing is reported then, not in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from closeranks.elastic.faults.cgroups import CPU, MEMORY, Lacking, Need, find_home
from closeranks.elastic.faults.disk import cannot_mount
from closeranks.elastic.faults.processes import cannot_take_descriptors


def lacking(kinds: Iterable[str]) -> dict[str, str]:
    """The kinds among these that are not possible here, each with the reason."""
    reasons = {kind: _ASK[kind]() for kind in dict.fromkeys(kinds) if kind in _ASK}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _without(need: Need) -> Callable[[], str]:
    def ask() -> str:
        try:
            find_home(need)
        except Lacking as lack:
            return str(lack)
        return ""

    return ask


_ASK: dict[str, Callable[[], str]] = {
    "exception": cannot_take_descriptors,
    "slow": _without(CPU),
    "oom": _without(MEMORY),
    "diskfull": cannot_mount,
}

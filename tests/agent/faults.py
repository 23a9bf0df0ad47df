"""Faults and verdicts made up for the laws of the policy."""

from __future__ import annotations

from typing import Any

from closeranks.agent.faultlog import Fault
from closeranks.agent.verdict import Verdict
from closeranks.core.errors import RunFailed


def fault(at: float = 0.0, **changes: Any) -> Fault:
    settings: dict[str, Any] = {"generation": 0, "kind": "killed", "step": 5, "rank": 0, "host": "a", "signature": "x"}
    return Fault(at=at, **{**settings, **changes})


def raised(step: int | None, **changes: Any) -> Verdict:
    settings: dict[str, Any] = {"culprit": 0, "error": RunFailed("rank 0 failed"), "kind": "exception"}
    settings |= {"cause": "ValueError: x", "signature": "x"}
    return Verdict(step=step, **{**settings, **changes})

"""Faults and verdicts made up for the laws of the policy."""

from __future__ import annotations

from typing import Any

from closeranks.agent.detection.root_cause import RootCause
from closeranks.agent.job.fault_log import FaultRecord
from closeranks.core.errors import RunFailed


def fault(at: float = 0.0, **changes: Any) -> FaultRecord:
    settings: dict[str, Any] = {"generation": 0, "kind": "killed", "step": 5, "rank": 0, "host": "a", "signature": "x"}
    return FaultRecord(at=at, **{**settings, **changes})


def raised(step: int | None, **changes: Any) -> RootCause:
    settings: dict[str, Any] = {"culprit": 0, "error": RunFailed("rank 0 failed"), "kind": "exception"}
    settings |= {"cause": "ValueError: x", "signature": "x"}
    return RootCause(step=step, **{**settings, **changes})

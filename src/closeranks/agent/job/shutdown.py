"""Shutdown: when a run ends after a failure or a signal, and how.

Nothing here touches a process. Invariant: every wait has a deadline. After a failure the other workers have a moment to
report; a shutdown request gives them its grace period; a fence is final.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

REPORT_S = 1.0
"""After the first failure, how long the other workers have to report theirs."""
CLEAR_S = 0.02
"""The same where a worker died without a report: the root cause is clear, and only reports in transit are read."""
REAP_S = 10.0
"""After a fence, how long the kernel may take to end a process; a GPU driver needs up to seconds."""

Reason = Literal["finished", "drained", "interrupted", "disconnected"]


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """A request to stop, when it was made, and when workers that have not ended by themselves are killed."""

    reason: Literal["drained", "interrupted", "disconnected"]
    since: float
    deadline: float


def shutdown_on_signal(
    stop: ShutdownRequest | None, signum: int, now: float, *, grace_s: float, interrupt_s: float
) -> ShutdownRequest:
    """SIGTERM and SIGHUP drain; Ctrl-C shortens the drain, also one under way; a second Ctrl-C stops at once."""
    if signum == signal.SIGHUP:
        return stop or ShutdownRequest("disconnected", now, now + grace_s)
    if signum == signal.SIGTERM:
        return stop or ShutdownRequest("drained", now, now + grace_s)
    if stop is None:
        return ShutdownRequest("interrupted", now, now + interrupt_s)
    if stop.reason == "interrupted":
        return ShutdownRequest("interrupted", stop.since, now)
    return ShutdownRequest("interrupted", stop.since, min(now + interrupt_s, stop.deadline))


def counts_as_failure(failed_at: float | None, stop: ShutdownRequest | None) -> bool:
    """Whether a failed worker makes the run a failed one. After Ctrl-C it does not, unless it failed before."""
    if failed_at is None:
        return False
    return stop is None or stop.reason != "interrupted" or failed_at < stop.since

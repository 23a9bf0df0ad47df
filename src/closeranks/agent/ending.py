"""When does a run end, and how?

Nothing here touches a process. Invariant: every wait has an end. A failure gives the other workers a moment to tell
their side; a request to stop gives them its grace; a fence is final.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

TELL_S = 1.0
"""After the first failure, how long the other workers have to tell their side."""
CLEAR_S = 0.02
"""The same where somebody died without a word: who began is clear, and only what is on its way already is heard."""
REAP_S = 10.0
"""After a fence, how long the kernel may take to end a process; a GPU driver needs up to seconds."""

Reason = Literal["finished", "drained", "interrupted", "disconnected"]


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to stop, since when it stands, and when patience with it ends."""

    reason: Literal["drained", "interrupted", "disconnected"]
    since: float
    deadline: float


def on_signal(stop: Stop | None, signum: int, now: float, *, grace_s: float, interrupt_s: float) -> Stop:
    """SIGTERM and SIGHUP drain; Ctrl-C drains in a hurry, also during a drain; Ctrl-C once more ends it now."""
    if signum == signal.SIGHUP:
        return stop or Stop("disconnected", now, now + grace_s)
    if signum == signal.SIGTERM:
        return stop or Stop("drained", now, now + grace_s)
    if stop is None:
        return Stop("interrupted", now, now + interrupt_s)
    if stop.reason == "interrupted":
        return Stop("interrupted", stop.since, now)
    return Stop("interrupted", stop.since, min(now + interrupt_s, stop.deadline))


def counts_as_failure(failed_at: float | None, stop: Stop | None) -> bool:
    """Whether a failed worker makes the run a failed one. Who pressed Ctrl-C wants it to end, not to hear how."""
    if failed_at is None:
        return False
    return stop is None or stop.reason != "interrupted" or failed_at < stop.since

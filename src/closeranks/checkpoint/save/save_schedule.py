"""The save schedule: decides when the next checkpoint is due.

Only rank 0 consults it, and any rank on which a save failed; the vote informs the others. ``every`` is a number of
steps (due at its multiples), a period of time (due at the first step at or after each multiple of it since the run's
first step), or "auto": the interval that is optimal for the measured cost of a save and the job's failure rate
(facts.checkpoint_policy.save_interval), learned during the run.

What "auto" guarantees: no save in the first ``FIRST_SAVE_S`` of a run, so that short runs do not pay for one; then one
save, which tests and measures the path, also after every restart; then saves at least one step and at most ``MOST_S``
apart, and never more often than saves become durable. A failed save is retried with exponential backoff, unless
``every`` is 0. Nothing is due while a save is in flight, except the multiples of a number of steps, which always are.

Invariant: no clock is read here; all times are monotonic seconds passed in by the caller, and none of them is stored in
``state``, which consists of plain JSON values and continues the estimate of the failure rate over restarts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from closeranks.checkpoint.config import seconds_of
from closeranks.facts.checkpoint_policy.save_interval import daly_period_s, learned_mtbf_s, prior_mtbf_s

FIRST_SAVE_S = 20.0
MOST_S = 1800.0
FIRST_RETRY_S = 15.0
MOST_RETRY_S = 600.0
GIVEN_UP_S = 7200.0
"""A save without any report for this long no longer blocks the next one."""
_WEIGHT = 0.3
"""Weight of a new measurement, once there are a few."""
_STEP_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """Measured saves and faults of the job, over all its restarts so far."""

    uptime_s: float = 0.0
    num_faults: int = 0
    stall_s: float = 0.0
    durable_s: float = 0.0
    drag_s: float = 0.0
    """How much longer the steps during one save took than other steps."""
    num_saves: int = 0
    """Number of measured saves, over all restarts; 0: the cost is not known."""

    @classmethod
    def decode(cls, state: Mapping[str, Any], num_new_faults: int | None = None) -> SaveHistory:
        """Decode what ``SaveSchedule.state`` wrote. A state that was not written at an orderly end counts as one
        fault."""
        known = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        new = num_new_faults if num_new_faults is not None else int(not state.get("is_ending", False))
        return replace(cls(**known), num_faults=int(state.get("num_faults", 0)) + new)

    @property
    def cost_s(self) -> float:
        """What a save costs training: it was blocked, or its steps were slower. Step times may include the stall, so
        this is the larger of the two, not the sum."""
        return max(self.stall_s, self.drag_s)

    def with_save(self, stall_s: float, durable_s: float, drag_s: float) -> SaveHistory:
        """The history with one more save. The first save allocated its buffers, so the second one overwrites its
        measurement."""
        number = self.num_saves + 1
        weight = 1.0 if number <= 2 else max(_WEIGHT, 1 / (number - 1))
        return replace(
            self,
            stall_s=_blend(self.stall_s, stall_s, weight),
            durable_s=_blend(self.durable_s, durable_s, weight),
            drag_s=_blend(self.drag_s, drag_s, weight),
            num_saves=number,
        )


def _blend(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)


class SaveSchedule:
    """Call ``is_due`` after every step, and report the result of each save with ``record_save`` or
    ``record_failure``."""

    def __init__(
        self, every: int | str, mtbf_s: float | None, num_ranks: int, history: SaveHistory | None = None
    ) -> None:
        self.every = every
        self.period_s = None if every == "auto" or isinstance(every, int) else seconds_of(every)
        self.configured_mtbf_s = mtbf_s
        self.prior_mtbf_s = prior_mtbf_s(num_ranks)
        self.history = history or SaveHistory()
        self._opened_at: float | None = None
        self._now_s = 0.0
        self._requested_at: float | None = None
        """When a save was found due, until its result is known."""
        self._last_saved_at: float | None = None
        """When the newest successful save since the last restart was requested."""
        self._tried_at: float | None = None
        """The same for the newest save, successful or not."""
        self._retry_at = math.inf
        self._num_failed = 0
        self._step_s = 0.0
        self._num_steps = 0
        self._slower_s = 0.0

    @classmethod
    def from_state(
        cls,
        every: int | str,
        mtbf_s: float | None,
        num_ranks: int,
        state: Mapping[str, Any],
        num_new_faults: int | None = None,
    ) -> SaveSchedule:
        """Continue with the estimate stored in a checkpoint; the number of faults since then is given, or inferred from
        whether the run ended in an orderly way."""
        return cls(every, mtbf_s, num_ranks, SaveHistory.decode(state, num_new_faults))

    def state(self, *, is_ending: bool = False) -> dict[str, Any]:
        """For the state tree; ``is_ending`` if this save is the last one of a run that ends or drains in order."""
        return {**asdict(self._history_now()), "is_ending": is_ending}

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether the state after this step should be saved. True once, then not again before ``record_save`` or
        ``record_failure``."""
        self._set_now(now_s)
        if self.every == 0:
            return False
        if isinstance(self.every, int) and step % self.every == 0:
            is_due = True
        elif self._is_under_way(now_s):
            is_due = False
        else:
            is_due = now_s >= self._next_s()
        if is_due:
            self._requested_at, self._tried_at, self._slower_s = now_s, now_s, 0.0
        return is_due

    def is_retry_due(self, now_s: float) -> bool:
        """On the other ranks, which call nothing else: whether a save failed here and should be retried."""
        self._set_now(now_s)
        return self._num_failed > 0 and now_s >= self._retry_at

    def record_started(self) -> None:
        """A save has started on all ranks, so a pending retry is no longer needed."""
        self._retry_at = math.inf

    def clear_failures(self) -> None:
        """On the other ranks, which do not learn of a commit: this rank's part of a save is durable."""
        self._num_failed, self._retry_at = 0, math.inf

    def record_step(self, seconds: float) -> None:
        """Record the wall time of one step. The first includes warm-up and is ignored."""
        self._num_steps += 1
        if self._num_steps == 1:
            return
        if self._requested_at is not None and self._num_steps > 2:
            self._slower_s += seconds - self._step_s
        else:
            self._step_s = _blend(self._step_s, seconds, max(_STEP_WEIGHT, 1 / (self._num_steps - 1)))

    def record_save(self, stall_s: float, durable_s: float, now_s: float) -> None:
        """A checkpoint was committed: training was blocked for ``stall_s``, and the save took ``durable_s`` in all."""
        self._set_now(now_s)
        requested_at, drag_s = now_s - durable_s, self.history.drag_s  # a save that this schedule did not request
        if self._requested_at is not None:
            requested_at, drag_s = self._requested_at, min(durable_s, max(-durable_s, self._slower_s))
        self.history = self.history.with_save(stall_s, durable_s, drag_s)
        self._last_saved_at = self._tried_at = requested_at
        self._requested_at, self._num_failed, self._retry_at = None, 0, math.inf

    def record_failure(self, now_s: float) -> None:
        """A save failed: retry soon, then at growing intervals."""
        self._set_now(now_s)
        self._requested_at = None
        self._retry_at = now_s + min(MOST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._num_failed, 30))
        self._num_failed += 1

    @property
    def mtbf_s(self) -> float:
        """The assumed mean time between failures: from the config, or learned."""
        if self.configured_mtbf_s is not None:
            return self.configured_mtbf_s
        return learned_mtbf_s(self.prior_mtbf_s, self._history_now().uptime_s, self.history.num_faults)

    @property
    def interval_s(self) -> float:
        """Time from save to save; infinite if only the end is saved, 0 while the step time is not known."""
        if isinstance(self.every, int):
            return self.every * self._step_s if self.every else math.inf
        if self.period_s is not None:
            return self.period_s
        wanted = min(MOST_S, daly_period_s(self.mtbf_s, self.history.cost_s))
        return max(wanted, self.history.durable_s, self._step_s)

    def _set_now(self, now_s: float) -> None:
        if self._opened_at is None:
            self._opened_at = now_s
        self._now_s = now_s

    def _history_now(self) -> SaveHistory:
        session_s = self._now_s - self._opened_at if self._opened_at is not None else 0.0
        return replace(self.history, uptime_s=self.history.uptime_s + session_s)

    def _is_under_way(self, now_s: float) -> bool:
        return self._requested_at is not None and now_s - self._requested_at < max(
            GIVEN_UP_S, 4 * self.history.durable_s
        )

    def _next_s(self) -> float:
        """The time from which a save is due."""
        if self._num_failed:
            return min(self._retry_at, self._next_multiple_s()) if self.period_s is not None else self._retry_at
        if isinstance(self.every, int):
            return math.inf
        if self.period_s is not None:
            return self._next_multiple_s()
        return self._began_s() + FIRST_SAVE_S if self._last_saved_at is None else self._last_saved_at + self.interval_s

    def _next_multiple_s(self) -> float:
        """The first multiple of the period for which no save was tried yet, so that delays do not accumulate."""
        began_s, span_s = self._began_s(), self.period_s or MOST_S
        gone_s = max(0.0, (self._tried_at if self._tried_at is not None else began_s) - began_s)
        return began_s + (math.floor(gone_s / span_s) + 1) * span_s

    def _began_s(self) -> float:
        return self._opened_at if self._opened_at is not None else self._now_s

"""What did a soak come to? Steps against those that the same time without faults would have given, and each fault's
cost. Pure.

Invariants: a step counts once, when it was first finished; what is measured against is the rate of the calms on both
sides of a storm; every second between a fault and the next new step is in the fault's stall, whoever spent it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

from soak_plan import Plan, Window
from soak_watch import Sample

from closeranks.core.events import SaveFailed, SlowRank
from closeranks.elastic.faults.fault import KINDS
from closeranks.telemetry.run_log.fault_history import RunFault, TimedEvent, fault_history

_SETTLE_S = 2.0
"""At the begin of a calm, what does not count: a fault of the storm may still be on its last step."""
PARTS = ("fence", "fork", "open", "restore", "step")


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was finished, in seconds since the clock began."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that struck."""

    at_s: float
    planned_s: float
    kind: str
    rank: int
    generation: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fault came to; None where there was nothing of that kind to measure."""

    struck: Struck
    detected_s: float | None = None
    repaired_s: float | None = None
    stall_s: float | None = None
    """From the strike to the next new step, less what a step takes."""
    num_redone: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    is_joined: bool = False
    """Whether another fault ended the same recovery or generation: what it cost cannot be told apart."""
    survived: bool = True


class Course:
    """How far the run was, at any second."""

    def __init__(self, lines: Sequence[Done]) -> None:
        self.new: list[Done] = []
        for line in sorted(lines, key=lambda line: line.at_s):
            if not self.new or line.step > self.new[-1].step:
                self.new.append(line)
        self._times = [line.at_s for line in self.new]

    def at(self, now_s: float) -> float:
        """Steps, a part of one included: between two ends of steps it grows evenly."""
        place = bisect_right(self._times, now_s)
        if place == 0 or place == len(self.new):
            return float(self.new[max(0, place - 1)].step)
        before, after = self.new[place - 1], self.new[place]
        share = (now_s - before.at_s) / (after.at_s - before.at_s)
        return before.step + share * (after.step - before.step)

    def rate(self, begins_s: float, ends_s: float) -> float:
        """Steps a second."""
        return (self.at(ends_s) - self.at(begins_s)) / (ends_s - begins_s)

    def next_after(self, now_s: float) -> Done | None:
        place = bisect_right(self._times, now_s)
        return self.new[place] if place < len(self.new) else None

    def last_before(self, now_s: float) -> Done | None:
        place = bisect_right(self._times, now_s)
        return self.new[place - 1] if place else None


def calm_rates(course: Course, windows: Sequence[Window]) -> list[float]:
    """Before, between and after the storms."""
    calms = [window for window in windows if not window.is_storm]
    settled = [min(window.begins_s + _SETTLE_S * (place > 0), window.ends_s) for place, window in enumerate(calms)]
    return [course.rate(begins_s, window.ends_s) for begins_s, window in zip(settled, calms, strict=True)]


def throughput(course: Course, plan: Plan) -> dict[str, Any]:
    """``ratio``: steps under faults over those that the neighbouring calms' rate would have given."""
    calms = calm_rates(course, plan.windows)
    made = [course.at(storm.ends_s) - course.at(storm.begins_s) for storm in plan.storms]
    due = [storm.seconds * mean(calms[place : place + 2]) for place, storm in enumerate(plan.storms)]
    return {
        "ratio": round(sum(made) / sum(due), 4),
        "ratio_by_storm": [round(have / want, 4) for have, want in zip(made, due, strict=True)],
        "ratio_range": [round(sum(made) / (rate * sum(s.seconds for s in plan.storms)), 4) for rate in _ends(calms)],
        "steps_made": round(sum(made), 1),
        "steps_due": round(sum(due), 1),
        "calm_steps_per_s": [round(rate, 4) for rate in calms],
        "calm_spread": round((max(calms) - min(calms)) / mean(calms), 4),
        "step_s": round(1 / mean(calms), 4),
        "ratio_to_steps_between": round(_to_steps_between(course, plan, sum(made)), 4),
    }


def _ends(calms: Sequence[float]) -> tuple[float, float]:
    """The fastest and the slowest: what the ratio would be, had the machine been so all the time."""
    return max(calms), min(calms)


def _to_steps_between(course: Course, plan: Plan, made: float) -> float:
    """The same against the median step of the storms themselves: a machine that others use drifts, this does not."""
    times = [line.at_s for line in course.new]
    inside = [
        b - a for a, b in pairwise(times) if any(storm.begins_s <= a and b <= storm.ends_s for storm in plan.storms)
    ]
    return made * median(inside) / sum(storm.seconds for storm in plan.storms) if inside else 0.0


def costs(
    struck: Sequence[Struck], events: Sequence[TimedEvent], began_at: float, course: Course, step_s: float
) -> list[Cost]:
    """``events``: those of the agent, and saves that failed."""
    faults = {fault.lost.generation: fault for fault in fault_history(events).faults}
    ending = Counter(one.generation for one in struck if KINDS[one.kind].ends_generation)
    found: list[Cost] = []
    for one in sorted(struck, key=lambda one: one.at_s):
        if KINDS[one.kind].ends_generation:
            is_alone = ending[one.generation] == 1
            found.append(_ended(one, faults.get(one.generation), began_at, course, step_s, is_alone=is_alone))
        else:
            found.append(_lasting(one, events, began_at))
    return found


def _ended(
    struck: Struck, fault: RunFault | None, began_at: float, course: Course, step_s: float, *, is_alone: bool
) -> Cost:
    if fault is None or fault.closed is None:
        return Cost(struck, survived=False)
    if not is_alone or fault.is_followed:
        return Cost(struck, is_joined=True)
    noticed_s = fault.at - began_at - fault.closed.parts.get("fence", 0.0)
    # When a loss is reported, nobody of its generation is left: later steps were finished by the next one.
    before, after = course.last_before(struck.at_s), course.next_after(fault.at - began_at)
    stall_s = after.at_s - before.at_s - (after.step - before.step) * step_s if before and after else None
    return Cost(
        struck,
        detected_s=max(0.0, noticed_s - struck.at_s),
        repaired_s=fault.closed.seconds,
        stall_s=stall_s,
        num_redone=fault.closed.num_redone,
        parts=fault.closed.parts,
    )


def _lasting(struck: Struck, events: Sequence[TimedEvent], began_at: float) -> Cost:
    """One that ends nothing: when it was first spoken of, if it was."""
    wanted = SlowRank if struck.kind == "slow" else SaveFailed
    times = [line.at - began_at for line in events if isinstance(line.event, wanted)]
    return Cost(struck, detected_s=min((at_s - struck.at_s for at_s in times if at_s >= struck.at_s), default=None))


def by_kind(found: Sequence[Cost]) -> dict[str, dict[str, Any]]:
    """Median and largest of each, kind by kind."""
    kinds = sorted({cost.struck.kind for cost in found})
    return {kind: _kind([cost for cost in found if cost.struck.kind == kind]) for kind in kinds}


def _kind(found: Sequence[Cost]) -> dict[str, Any]:
    values = {name: [getattr(cost, name) for cost in found] for name in ("detected_s", "repaired_s", "stall_s")}
    return {
        "num": len(found),
        "num_joined": sum(cost.is_joined for cost in found),
        **{name: _middle([each for each in values[name] if each is not None]) for name in values},
        "most_redone": max((cost.num_redone for cost in found if cost.num_redone is not None), default=None),
    }


def _middle(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": round(median(values), 3), "max": round(max(values), 3)} if values else None


def parts_of(found: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """Where the time of a repair went, over all faults that had one of their own."""
    own = [cost.parts for cost in found if cost.parts]
    return {part: _middle([parts.get(part, 0.0) for parts in own]) or {} for part in PARTS} if own else {}


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more of something the end may have than the beginning."""

    share: float
    most: float


GROWTH = {
    "agent_bytes": Bound(0.1, 8 << 20),
    "agent_fds": Bound(0.0, 2),
    "zygote_bytes": Bound(0.1, 16 << 20),
    "zygote_fds": Bound(0.0, 2),
    "boxes_bytes": Bound(0.0, 1 << 20),
    "num_processes": Bound(0.0, 0),
}
"""The larger of both counts."""


def growth(first: Sequence[Sample], last: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Medians over the first and the last calm."""
    found = {}
    for name, bound in GROWTH.items():
        before, after = (median(getattr(one, name) for one in samples) for samples in (first, last))
        limit = before + max(bound.share * before, bound.most)
        found[name] = {"before": int(before), "after": int(after), "is_leak": after > limit}
    return found

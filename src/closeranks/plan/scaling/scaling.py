"""How does a job scale over devices? The best plan at each number of devices, with one batch and with a growing one.

Strong scaling keeps the job's global batch; weak scaling lets it grow with the devices. Invariant: every point is the
winner of a search of its own, so that a curve shows what the cluster allows and not what one layout does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from closeranks.core.errors import UserError
from closeranks.facts.cluster import with_devices
from closeranks.plan.search.changes import is_legal
from closeranks.plan.search.search import Plan, PlanEstimator, PlanQuestion, SearchResult, search_plans, with_batch
from closeranks.plan.step_time.workload import PlanChoice

COMMUNICATION = (
    "tensor communication", "data communication", "context communication", "expert communication", "pipeline sends",
)  # fmt: skip
BUBBLE = "pipeline bubble"
_MOST_POINTS = 24


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The best plan on a number of devices; None where nothing fits or is legal."""

    num_devices: int
    global_batch: int
    question: PlanQuestion
    result: SearchResult

    @property
    def plan(self) -> Plan | None:
        return self.result.winner

    @property
    def communication(self) -> float:
        """Share of the step in which devices wait for messages."""
        return 0.0 if self.plan is None else share_of(self.plan, COMMUNICATION)

    @property
    def bubble(self) -> float:
        return 0.0 if self.plan is None else share_of(self.plan, (BUBBLE,))


def share_of(plan: Plan, names: Sequence[str]) -> float:
    return seconds_of(plan, names) / plan.step.seconds


def seconds_of(plan: Plan, names: Sequence[str]) -> float:
    return sum(part.seconds for part in plan.step.parts if part.name in names)


@dataclass(frozen=True, slots=True)
class ScaleCurve:
    """One kind of scaling."""

    kind: str
    """``strong`` or ``weak``"""
    points: tuple[ScalePoint, ...]

    @property
    def first(self) -> ScalePoint | None:
        """The point that efficiency is relative to: the smallest number of devices on which something fits."""
        return next((point for point in self.points if point.plan is not None), None)

    def efficiency(self, point: ScalePoint) -> float | None:
        """Tokens per second and device, relative to the first point."""
        if self.first is None or self.first.plan is None or point.plan is None:
            return None
        return per_device(point) / per_device(self.first)

    def takes_over(self, share: float) -> ScalePoint | None:
        """From where on communication and bubble together take more than this share of every step."""
        last = None
        for point in reversed(self.points):
            if point.plan is not None and point.communication + point.bubble <= share:
                break
            last = point if point.plan is not None else last
        return last


def per_device(point: ScalePoint) -> float:
    """Tokens (or samples) per second and device."""
    assert point.plan is not None
    return point.global_batch / point.plan.step.seconds / point.num_devices


def device_counts(first: int, last: int) -> tuple[int, ...]:
    """Doublings from the first number, and the last."""
    if not 1 <= first <= last:
        raise UserError(f"there is nothing from {first} to {last} devices", "Name --from and a larger --to.")
    counts = [first]
    while 2 * counts[-1] < last:
        counts.append(2 * counts[-1])
    counts += [last] if last > first else []
    if len(counts) > _MOST_POINTS:
        raise UserError(f"{len(counts)} points are too many", "Name --from and --to that are nearer.")
    return tuple(counts)


def scale_curves(
    question: PlanQuestion,
    counts: Sequence[int],
    batch_at: int,
    on_point: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ScaleCurve, ScaleCurve]:
    """Strong and weak scaling. ``batch_at``: the devices that the job's batch is meant for, in weak scaling."""
    batch = question.workload.global_batch
    estimator = None
    strong: list[ScalePoint] = []
    weak: list[ScalePoint] = []
    for count in counts:
        here = replace(question, cluster=with_devices(question.cluster, count))
        for points, size in ((strong, batch), (weak, max(1, batch * count // batch_at))):
            if points is weak and size == batch:
                points.append(strong[-1])
            else:
                asked = with_batch(here, size)
                estimator = PlanEstimator(asked, estimator)
                points.append(ScalePoint(count, size, asked, search_plans(asked, 3, estimator)))
            on_point(len(strong) + len(weak), 2 * len(counts))
    return ScaleCurve("strong", tuple(strong)), ScaleCurve("weak", tuple(weak))


def own_plan(point: ScalePoint | None, choice: PlanChoice | None) -> Plan | None:
    """The plan of the job's own choice at a point; None if it does not run on so many devices."""
    if point is None or choice is None or not is_legal(choice, point.question):
        return None
    return PlanEstimator(point.question).plan(choice) if choice.layout.num_ranks == point.num_devices else None

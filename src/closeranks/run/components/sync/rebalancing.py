"""Gives slower data ranks fewer micro-batches of each step: ``elastic.stragglers = "rebalance"``.

``sync.balance`` decides; this component measures, and applies the decision on all ranks between the same two steps.
Every ``elastic.slow_steps`` steps the vote carries each rank's own seconds per micro-batch. All ranks read the same
sums and decide the same; the loader then assigns other ranges of the same micro-batches, in the same order. Gradients
are sums over all micro-batches, so losses change by rounding alone.

Invariants: no collective beside the vote; shares are part of the state (``Batches``), so a step that is repeated or
resumed sums in the same order. Measurements are not: after a restart they begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from closeranks.core.events import Event
from closeranks.elastic.vote import Ballot
from closeranks.facts.mesh import Mesh
from closeranks.run.builder.context import RunContext
from closeranks.run.components.batches import Batches
from closeranks.run.components.component import Component
from closeranks.sync.balance import rebalanced, step_seconds

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

SPAN_S = 2.0
"""Steps shorter than this, all together, are not judged: a scheduler may favour a process for a second."""
_KEY = "compute_s"


class Rebalancing(Component):
    def __init__(self, context: RunContext, batches: Batches) -> None:
        self._context, self._batches = context, batches
        self._every = context.job.elastic.slow_steps
        self._since: int | None = None
        """Times are of the steps after this one; None until the first step is over, which warms up."""
        self._due_at = 0

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if self._is_due(index + 1):
            world = self._context.groups.world
            own = torch.zeros(world.size, dtype=torch.float64, device=self._context.device)
            own[world.rank] = self._context.step_timer.compute_s
            ballot.extra[_KEY] = own

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        step = entry.done.step
        if self._since is None:
            self._measure_from(step)
        elif self._is_due(step) and _KEY in entry.extra:
            self._decide(step, entry.extra[_KEY])

    def _is_due(self, step: int) -> bool:
        """On an accelerator a vote is read after the next one is cast, so that either may carry times that the other
        phase does not expect: they are then not read."""
        return self._since is not None and step >= self._due_at

    def _measure_from(self, step: int) -> None:
        self._context.step_timer.pop_compute_s()
        self._since, self._due_at = step, step + self._every

    def _decide(self, step: int, times: Sequence[float]) -> None:
        assert self._since is not None
        context, shares = self._context, self._batches.current_shares
        seconds, fill = seconds_by_data_rank(times, context.groups.mesh), context.layout.pipeline - 1
        if (step - self._since) * step_seconds(shares, seconds, fill=fill) < SPAN_S:
            self._due_at = step + self._every
            return
        self._measure_from(step)
        if step < context.schedule.num_steps:
            self._batches.set_shares(rebalanced(shares, seconds, fill=fill), step)


def seconds_by_data_rank(times: Sequence[float], mesh: Mesh) -> list[float]:
    """The time of the slowest of the ranks that work on the same micro-batches; 0 if one of them measured none.
    ``times``: of each rank."""
    _, replicas, shards, _ = mesh.sizes
    found: list[list[float]] = [[] for _ in range(replicas * shards)]
    for rank, seconds in enumerate(times):
        at = mesh.coordinate(rank)
        found[at.replica * shards + at.shard].append(seconds)
    return [max(own) if min(own) > 0 else 0.0 for own in found]

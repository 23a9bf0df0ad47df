"""Rules of local SGD for jobs and layouts: how many replicas there are, and which layouts they fit.

A replica is a set of ranks that sums its gradients in every step; with ``[sync.local]`` there are several, which
synchronise every so many steps. Pure, without torch: the command line and the agents decide with it. Invariant: where
``[sync.local]`` is off there is one replica, and nothing here changes or refuses anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from closeranks.core.errors import Problem
from closeranks.facts.layout import Layout, divisors, pluralize
from closeranks.sync.config import SyncConfig


def job_problems(
    sync: SyncConfig, *, steps: int | None, batch_norm: str, noise_every: int, ema: float
) -> Iterator[Problem]:
    """What is wrong with ``[sync.local]`` in a job, as far as one can tell without knowing the workers."""
    local = sync.local
    if not local.is_on:
        return
    if noise_every:
        what = "with local SGD there is no gradient of the whole batch to compare a part's with"
        yield Problem("train.noise_every", what, "Set sync.local.every = 0, or train.noise_every = 0.")
    if ema:
        what = "with local SGD each replica would average only its own weights"
        yield Problem("optim.ema", what, "Set it to 0, or sync.local.every = 0.")
    if steps is not None and local.every > steps:
        what = f"an outer step every {local.every} steps would never happen in a run of {pluralize(steps, 'step')}"
        yield Problem("sync.local.every", what, f"Set it to {steps} or less.")
    if local.every % local.fragments:
        what = f"{local.fragments} fragments cannot be spaced evenly within {local.every} steps"
        yield Problem("sync.local.fragments", what, f"Use one of {divisors(local.every, 64)}.")
    if batch_norm == "sync":
        what = "synchronised batch norm needs all data ranks in every forward, but replicas train locally"
        fix = 'Set layout.batch_norm = "micro": running statistics are then averaged at outer steps.'
        yield Problem("layout.batch_norm", what, fix)


def layout_problems(sync: SyncConfig, layout: Layout) -> Iterator[Problem]:
    """Whether a legal layout divides into the replicas that the job asks for."""
    most = _most_replicas(layout)
    count = sync.local.replicas if sync.local.is_on and sync.local.replicas else 1
    if most % count:
        ranks = pluralize(layout.data, "data rank")
        over = f", each {layout.shard} of which split one state," if layout.zero else ""
        what = f"{ranks}{over} do not divide into {count} local SGD replicas"
        yield Problem("sync.local.replicas", what, f"Use one of {divisors(most)}.")


def num_replica_groups(sync: SyncConfig, layout: Layout, num_hosts: int = 1) -> int:
    """How many replicas synchronise now and then; 1 where gradients are summed over all ranks in every step."""
    local = sync.local
    if not local.is_on or local.replicas:
        return local.replicas if local.is_on else 1
    if layout.zero and layout.shard:
        return layout.data // layout.shard
    most = num_hosts if num_hosts > 1 else layout.data
    return max(size for size in divisors(layout.data) if size <= most)


def shard_within_replica_group(layout: Layout, count: int) -> Layout:
    """State is split over the data ranks of one replica, unless the job says over how many."""
    if count == 1 or layout.zero == 0 or layout.shard or layout.data % count:
        return layout
    return replace(layout, shard=layout.data // count)


def planned_layout(sync: SyncConfig, layout: Layout) -> Layout:
    """As far as the job alone tells: how many hosts there are is known when a run is assembled."""
    return shard_within_replica_group(layout, sync.local.replicas or 1) if sync.local.is_on else layout


def is_balanced(sync: SyncConfig, count: int) -> bool:
    """Whether slower replicas may have fewer micro-batches."""
    return sync.local.is_on and sync.local.balance and count > 1


def whole_replica_groups(sync: SyncConfig, full: Layout, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Layouts that consist of whole replicas of the full one; none where a job does not say how many there are."""
    width = _width(sync, full)
    for layout in layouts if width else ():
        is_alike = (layout.tensor, layout.pipeline, layout.schedule) == (full.tensor, full.pipeline, full.schedule)
        if is_alike and layout.data % width == 0 and (layout.zero == 0 or layout.shard == full.shard):
            yield layout


def resized(sync: SyncConfig, full: Layout, layout: Layout) -> SyncConfig:
    """Replicas keep their size and become fewer; where that does not divide evenly, the number of replicas is the
    largest possible one that does not exceed the earlier number."""
    local, width = sync.local, _width(sync, full)
    if not width:
        return sync
    most = _most_replicas(layout)
    kept, rest = divmod(layout.data, width)
    if rest or not kept or most % kept:
        kept = max(number for number in divisors(most) if number <= local.replicas)
    return sync.model_copy(update={"local": local.model_copy(update={"replicas": kept})})


def describe_resize(before: SyncConfig, now: SyncConfig) -> str:
    """For people; empty where the number of replicas did not change."""
    count = now.local.replicas
    return "" if count == before.local.replicas else f"{pluralize(count, 'replica')} of {before.local.replicas} remain"


def _width(sync: SyncConfig, full: Layout) -> int:
    """Data ranks of one replica, where the job says how many replicas there are; else 0."""
    return full.data // sync.local.replicas if sync.local.is_on and sync.local.replicas else 0


def _most_replicas(layout: Layout) -> int:
    return layout.data // ((layout.shard or layout.data) if layout.zero else 1)

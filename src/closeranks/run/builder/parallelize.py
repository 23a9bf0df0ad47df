"""Parallelises a job's model: turns the job's layout into a distributed model and a reducer for it.

Translates the job's tables into what the packages ``parallel`` and ``sync`` take. It decides nothing itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from closeranks.core.protocols import Reducer
from closeranks.facts.layout import Layout
from closeranks.facts.memory.memory_per_rank import resolve_hold as resolve_hold_of
from closeranks.optim.config import OptimConfig
from closeranks.optim.groups import GroupAssignment
from closeranks.optim.optimizer import freeze
from closeranks.parallel.apply import DistributedModel, ParallelSettings
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.parallel.precision import Precision
from closeranks.run.builder.reduction_choice import must_stay_uncompressed, push_compression
from closeranks.run.job.job import Job, micro_batch_size
from closeranks.sync.collectives.reductions import ReductionFactory
from closeranks.sync.local_sgd.sync_schedule import SyncSchedule
from closeranks.sync.reducers.all_reduce import AllReduceReducer
from closeranks.sync.reducers.fully_sharded import FullyShardedReducer
from closeranks.sync.reducers.sharded import ShardedReducer
from closeranks.sync.server.asynchronous import AsynchronousReducer
from closeranks.sync.server.backup import BackupReducer
from closeranks.sync.server.reducer import ServerReducer
from closeranks.sync.server.roles import roles
from closeranks.sync.server.stale import StaleReducer

_EVERY_STEP = SyncSchedule()


class ParameterGrouping:
    """Assigns the parameters of the whole model to optimizer groups, and freezes those that are not trained."""

    assignment: GroupAssignment

    def __init__(self, config: OptimConfig) -> None:
        self._config = config

    def assign_groups(self, module: nn.Module) -> None:
        self.assignment = freeze(module, self._config)


def resolve_hold(job: Job, layout: Layout) -> str:
    """``layout.hold``, with ``auto`` resolved for this layout."""
    return resolve_hold_of(job.layout.hold, layout)


def parallel_settings(job: Job, layout: Layout) -> ParallelSettings:
    return ParallelSettings(
        layout=layout,
        hold=resolve_hold(job, layout),
        batch_norm=job.layout.batch_norm,
        prefetch=job.sync.prefetch,
        overlap=job.sync.overlap,
        precision=Precision(job.train.precision),
        seed=job.run.seed,
        micro_batch=micro_batch_size(job),
        compiled=job.train.compile,
        recompute=job.train.recompute,
        recompute_keep=job.train.recompute_keep,
        sums_replicas=job.sync.gradients.name == "none",
    )


def make_reducer(
    job: Job,
    layout: Layout,
    groups: MeshGroups,
    applied: DistributedModel,
    reduction_factory: ReductionFactory | None = None,
    bucket_mib: float = 0.0,
    schedule: SyncSchedule = _EVERY_STEP,
) -> Reducer:
    """``reduction_factory``: None for torch's own collectives; ``bucket_mib``: the size that
    ``sync.bucket_mib = "auto"`` chose."""
    sync = job.sync
    buckets: dict[str, Any] = {**sync.bucket_caps(bucket_mib)._asdict(), "overlap": sync.overlap}
    if sync.server.is_on:
        servers = applied.held, groups.data, roles(sync, groups.data.size)
        buckets["compression"] = push_compression(sync, schedule.num_steps)
        if sync.server.waits_for_all:
            return ServerReducer(*servers, **buckets)
        buckets["last_step"] = lambda step: schedule.next_sync(step) - 1
        if sync.server.backup:
            return BackupReducer(*servers, **buckets)
        kind = StaleReducer if sync.server.mode == "stale" else AsynchronousReducer
        return kind(*servers, **buckets, bound=sync.server.bound)
    options: dict[str, Any] = {
        **buckets,
        "reduction_factory": reduction_factory,
        "is_exact": partial(must_stay_uncompressed, layout),
    }
    if layout.zero == 3:
        modules = list(applied.stages.values())
        hold = resolve_hold(job, layout)
        replica_group, is_exact = groups.replica_group, options["is_exact"]
        return FullyShardedReducer(
            applied.held,
            modules,
            groups.shard,
            replica_group.replica,
            hold=hold,
            reduction_factory=reduction_factory,
            is_exact=is_exact,
        )
    if layout.zero:
        return ShardedReducer(
            applied.held,
            groups.shard,
            groups.replica_group.replica,
            zero=layout.zero,
            hold=resolve_hold(job, layout),
            **options,
        )
    return AllReduceReducer(applied.held, groups.replica_group.data, **options)

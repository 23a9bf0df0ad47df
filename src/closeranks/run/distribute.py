"""How does a job's layout become a distributed model and a reducer for it?

Translates the job's tables into what the rooms ``parallel`` and ``sync`` ask for. It decides nothing of its own.
"""

from __future__ import annotations

from torch import nn

from closeranks.core.protocols import Reducer
from closeranks.facts.layout import Layout
from closeranks.facts.spread import hold_of as facts_hold_of
from closeranks.optim.config import OptimConfig
from closeranks.optim.groups import Assignment
from closeranks.optim.optimizer import freeze
from closeranks.parallel.apply import Applied, Wishes
from closeranks.parallel.mesh import Groups
from closeranks.parallel.precision import Precision
from closeranks.run.job import Job, micro_batch_size
from closeranks.sync.allreduce import AllReduce
from closeranks.sync.buckets import MIB
from closeranks.sync.fsdp import FullyShardedReducer
from closeranks.sync.shards import ShardedReducer


class Freezing:
    """Decides on the whole model which parameters are updated alike, and which not at all."""

    assignment: Assignment

    def __init__(self, config: OptimConfig) -> None:
        self._config = config

    def decide(self, module: nn.Module) -> None:
        self.assignment = freeze(module, self._config)


def hold_of(job: Job, layout: Layout) -> str:
    """What ``auto`` means for this layout."""
    return facts_hold_of(job.layout.hold, layout)


def wishes_of(job: Job, layout: Layout) -> Wishes:
    return Wishes(
        layout=layout,
        hold=hold_of(job, layout),
        batch_norm=job.layout.batch_norm,
        prefetch=job.sync.prefetch,
        overlap=job.sync.overlap,
        precision=Precision(job.train.precision),
        seed=job.run.seed,
        micro_batch=micro_batch_size(job.train),
        compiled=job.train.compile,
        recompute=job.train.recompute,
        recompute_keep=job.train.recompute_keep,
    )


def make_reducer(job: Job, layout: Layout, groups: Groups, applied: Applied) -> Reducer:
    sync = job.sync
    caps = {"bucket_bytes": int(sync.bucket_mib * MIB), "first_bucket_bytes": int(sync.first_bucket_mib * MIB)}
    if layout.zero == 3:
        modules = list(applied.stages.values())
        return FullyShardedReducer(applied.held, modules, groups.shard, groups.replica, hold=hold_of(job, layout))
    if layout.zero:
        return ShardedReducer(
            applied.held,
            groups.shard,
            groups.replica,
            zero=layout.zero,
            hold=hold_of(job, layout),
            overlap=sync.overlap,
            **caps,
        )
    return AllReduce(applied.held, groups.data, overlap=sync.overlap, **caps)

"""Local SGD, DiLoCo and streaming DiLoCo, as a component: replicas take local steps and synchronise every so many.

``sync.local_sgd.outer_step`` computes the outer step, ``sync.local_sgd.sync_schedule`` says when there is one, and
``elastic.local_sgd_vote`` counts the votes in between. This component connects them to a run.

State: each replica has its own moments, counters and loss scale, and with several fragments its own weights between two
synchronisations; ``run.state.saved_state`` says how those are saved. What all replicas share, the anchor (DiLoCo's
outer weights) and the outer momentum, is saved once, piece by piece as weights are. The model in a checkpoint is the
anchor: the weights that all replicas had when each fragment was last synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.capture.tensors import StateTensor
from closeranks.core.errors import ConfigError, Problem
from closeranks.core.events import Event
from closeranks.core.protocols import ErrorFeedbackTensor, Reducer
from closeranks.elastic.local_sgd_vote import LocalSgdVote
from closeranks.elastic.vote import Verdict, Vote
from closeranks.parallel.apply import is_sharded
from closeranks.parallel.process_group import RankGroup
from closeranks.run.builder.context import RunContext
from closeranks.run.builder.reduction_choice import (
    compression_schedule,
    describe_compressed_sync,
    must_stay_uncompressed,
)
from closeranks.run.components.batches import Batches
from closeranks.run.components.component import Component, Unique
from closeranks.run.components.model import Model, make_state_tensor
from closeranks.run.components.sync.compression_quality import CompressionQuality
from closeranks.run.components.sync.error_feedback import restore_error_feedback
from closeranks.run.components.sync.gradient_sync import error_feedback_state
from closeranks.run.job.job import Job
from closeranks.run.state.saved_state import MODEL, SYNC, ReplicaIndex, SavedState
from closeranks.sync.balance import rebalanced
from closeranks.sync.collectives.reductions import ReductionFactory, plain_reductions
from closeranks.sync.compress.build import compressed_reductions
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.config import LocalConfig
from closeranks.sync.local_sgd.outer_step import OuterOptimizer, OuterSgd
from closeranks.sync.local_sgd.sync_schedule import assign_fragments

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

_OUTER, _MOMENTUM, _WEIGHTS = "outer/", "outer/momentum/", "outer/weights/"


class LocalSgd(Component):
    """``vote``: the vote of this run; ``replica``: the index of this replica's own state in what is saved."""

    unique = Unique.REPLICA

    def __init__(self, context: RunContext, model: Model, reducer: Reducer, batches: Batches) -> None:
        job, replica_group = context.job, context.groups.replica_group
        self._context, self._model, self._batches = context, model, batches
        self._compression = _outer_compression(job, replica_group.across_groups, context.schedule.num_steps)
        self.outer = _make_outer(context, model, reducer, self._compression)
        self._quality = CompressionQuality(
            self._compression, context.groups.world, context.device, emits=context.world.is_lead
        )
        self._is_streaming = context.sync_schedule.num_fragments > 1
        compress = job.sync.compress
        self._recompresses_sums = context.layout.data > 1 and compress.name not in ("none", "powersgd")
        self.replica = ReplicaIndex(replica_group.number, replica_group.count)
        self.vote: Vote = LocalSgdVote(
            replica_group.world,
            context.groups.world,
            model.spec.metrics,
            clip=job.optim.clip,
            num_replica_groups=replica_group.count,
            contributes=replica_group.world.rank == 0,
        )

    def after_update(self, index: int, verdict: Verdict) -> None:
        """At a boundary, take the outer step: all replicas have the same weights again, of the fragments it covers."""
        context, step = self._context, index + 1
        if not context.sync_schedule.is_sync_step(step):
            return
        context.step_timer.enter_phase(WorkerPhase.OUTER_STEP)
        shares, replica_group = self._batches.loader.shares, context.groups.replica_group
        share = shares[replica_group.number] / sum(shares) if shares else None
        self.outer.outer_step(step, context.sync_schedule.fragments(step), share)
        self._quality.measure(step, step, self.outer.compression_errors)
        for statistics in self._model.statistics:
            statistics.average(replica_group.across_groups)
        if self._batches.num_shares and step < context.schedule.num_steps:
            self._rebalance(step)

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        self._quality.report(entry.done, emit)

    def started(self) -> Mapping[str, Any]:
        job = self._context.job
        fields = {"apart": describe_local_sgd(job.sync.local, self._context.groups.replica_group.count)}
        compress = job.sync.compress
        if compress.name != "none" and self._context.layout.data > 1:
            compression = compression_schedule(compress, self._context.schedule.num_steps)
            fields["sync"] = describe_compressed_sync(compress, compression, "outer gradients")
        return fields

    def _rebalance(self, step: int) -> None:
        """Collective. Divides micro-batches by the time that each rank took for one since the last call; a replica is
        as slow as its slowest rank."""
        context, batches = self._context, self._batches
        replica_group, world = context.groups.replica_group, context.groups.world
        measured = torch.zeros(replica_group.count, world.size, dtype=torch.float64, device=context.device)
        measured[replica_group.number, world.rank] = context.step_timer.pop_compute_s()
        seconds = world.sum(measured).amax(1).tolist()
        width = context.groups.data.size // replica_group.count
        batches.set_shares(rebalanced(batches.current_shares, seconds, width), step)

    # State

    def tensors(self) -> Iterator[StateTensor]:
        for shard, anchor, momentum in self.outer.states():
            if self._is_streaming:
                yield self._model.shard_state(MODEL, shard, shard.piece.name, anchor)
            if momentum is not None:
                yield self._model.shard_state(SYNC, shard, f"{_MOMENTUM}{shard.piece.name}", momentum)
        yield from map(error_feedback_state, self._error_feedback())
        if self._is_streaming:
            yield from self._own_weights()

    def version(self) -> object:
        """Views of the anchor are made anew on each call, which is at most once per synchronisation."""
        return object() if self._is_streaming else None

    def restore(self, saved: SavedState) -> None:
        """The anchor is read from the saved state, not copied from the weights even if these are equal: on an
        accelerator their copy may still be in flight."""
        self.outer.restart()
        found = saved.shapes(SYNC)
        for shard, anchor, momentum in self.outer.states():
            key = f"{_MOMENTUM}{shard.piece.name}"
            if momentum is not None and key in found:
                saved.read_into(SYNC, key, replace(shard.piece, name=key), momentum)
            saved.read_into(MODEL, shard.piece.name, shard.piece, anchor)
        restore_error_feedback(list(self._error_feedback()), saved, SYNC, recompresses_sums=self._recompresses_sums)
        for one in self._own_weights() if self._is_streaming else ():
            if one.key in found:
                saved.read_into(SYNC, one.key, one.piece, one.tensor)
            else:
                name = one.key.removeprefix(_WEIGHTS)
                saved.read_into(MODEL, name, replace(one.piece, name=name), one.tensor)

    def weights_loaded(self) -> None:
        self.outer.restart()

    def _own_weights(self) -> Iterator[StateTensor]:
        """The weights of this replica. With several fragments they differ from the anchor even at a synchronisation,
        which covers one fragment."""
        replica_group = self._context.groups.replica_group
        for one in self._model.local_tensors():
            if one.piece.name in self._model.applied.trainable:
                piece = replace(one.piece, name=f"{_WEIGHTS}{one.piece.name}")
                holders = replica_group.replica if one.is_sharded else replica_group.data
                yield replace(
                    make_state_tensor(SYNC, piece, one.tensor, holders, is_saved_here=one.is_saved_here),
                    per_replica=True,
                )

    def _error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        """Error feedback of the compressed deltas. Ranks of one replica that hold the same parameter shards have the
        same error feedback, and the first of them saves it."""
        replica_group = self._context.groups.replica_group
        is_first = (replica_group.replica if self._context.layout.zero else replica_group.data).rank == 0
        for one in self.outer.error_feedback():
            piece = replace(one.piece, name=f"{_OUTER}{one.piece.name}")
            yield replace(one, piece=piece, is_saved_here=one.is_saved_here and is_first)


def _make_outer(
    context: RunContext, model: Model, reducer: Reducer, compression: CompressionSchedule | None
) -> OuterOptimizer:
    local, layout, replica_group = context.job.sync.local, context.layout, context.groups.replica_group
    applied = model.applied
    sizes = {name: prod(shape) for name, shape in applied.shapes.items() if name in applied.trainable}
    if local.fragments > len(sizes):
        what = f"the model's {len(sizes)} trained parameters cannot be cut into {local.fragments} fragments"
        raise ConfigError([Problem("sync.local.fragments", what, f"Set it to {len(sizes)} or less.")])
    whole = {one.piece.name for one in applied.held if layout.zero == 3 and not is_sharded(one)}
    shared = {held.piece.name for held in applied.held if held.aliases and context.groups.pipeline.size > 1}
    return OuterOptimizer(
        reducer.parameter_shards(),
        assign_fragments(sizes, model.spec.blocks, local.fragments),
        OuterSgd(local.outer_lr, local.outer_momentum, local.nesterov),
        replica_group.count,
        _reductions(context.job, replica_group.across_groups, compression),
        plain_reductions(replica_group.across_groups),
        exact=whole | {one.piece.name for one in applied.held if must_stay_uncompressed(layout, one)},
        alone=whole | shared,
    )


def _outer_compression(job: Job, across: RankGroup, num_steps: int) -> CompressionSchedule | None:
    """When deltas are compressed; None: never. Every synchronisation is measured, as they are few."""
    config = job.sync.compress
    if config.name == "none" or across.size == 1:
        return None
    return CompressionSchedule(config.num_warmup(num_steps), 1 if config.measure_every else 0)


def _reductions(job: Job, across: RankGroup, compression: CompressionSchedule | None) -> ReductionFactory:
    return (
        plain_reductions(across)
        if compression is None
        else compressed_reductions(job.sync.compress, across, compression)
    )


def describe_local_sgd(local: LocalConfig, num_replicas: int) -> str:
    """``2 replicas, outer step every 32 steps: DiLoCo, outer lr 0.7, momentum 0.9``."""
    who = f"{num_replicas} replicas, outer step" if num_replicas > 1 else "1 replica, outer step"
    when = f"every {local.every} steps" if local.every > 1 else "after every step"
    if local.fragments > 1:
        when += f", one of {local.fragments} fragments every {local.every // local.fragments}"
    return f"{who} {when}: {_describe_rule(local)}"


def _describe_rule(local: LocalConfig) -> str:
    if local.outer_momentum == 0 and local.outer_lr == 1:
        return "local SGD, a plain mean"
    name = "streaming DiLoCo" if local.fragments > 1 else "DiLoCo"
    momentum = f"momentum {local.outer_momentum:g}" + ("" if local.nesterov else " without Nesterov")
    return f"{name}, outer lr {local.outer_lr:g}, {momentum if local.outer_momentum else 'no momentum'}"

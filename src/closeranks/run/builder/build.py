"""Builds a run: opens the group, applies the layout to the model, and lists the components.

The one place that connects all packages and fixes the order of components. It decides nothing: the choices are in the
job, the arithmetic in the other packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from closeranks.core.errors import ConfigError
from closeranks.core.protocols import DataSource, LocalParameter, ModelSpec, Reducer
from closeranks.core.system.fork_safety import track_sockets
from closeranks.core.world import World
from closeranks.data.loading.loader import Loader
from closeranks.data.loading.quarantine import Quarantine
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.sampling.job_order import order_of
from closeranks.data.sampling.order import BatchSchedule
from closeranks.data.sampling.returned import ReturnedMicroBatches
from closeranks.data.source import as_loader_source
from closeranks.elastic.vote import Vote
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import tensor_axis_warning
from closeranks.optim.loss_scale import LossScale
from closeranks.optim.lr_scaling import lr_scaling_warning, with_scaled_lr
from closeranks.optim.optimizer import Optimizer
from closeranks.parallel.apply import DistributedModel, parallelize
from closeranks.parallel.mesh_groups import MeshGroups, open_mesh_groups
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup, WorldGroup, open_world_group
from closeranks.run.builder.context import RunContext, batch_schedule, check_last_step, choose_device
from closeranks.run.builder.parallelize import ParameterGrouping, make_reducer, parallel_settings
from closeranks.run.builder.reduction_choice import ReductionChoice, choose_reduction, freeze_step
from closeranks.run.components.batches import Batches, check_dataset_lengths
from closeranks.run.components.component import Component, Components
from closeranks.run.components.ema import Ema
from closeranks.run.components.gradient_noise import GradientNoiseScale
from closeranks.run.components.model import Model, RunningStatistics
from closeranks.run.components.model_flops import ModelFlops, make_model_flops
from closeranks.run.components.optimizer import LossScaling, OptimizerStep
from closeranks.run.components.resource_use import MemoryRecorder, ResourceUse
from closeranks.run.components.step_phases import PhaseRecorder
from closeranks.run.components.sync.backup_workers import BackupWorkers
from closeranks.run.components.sync.compression_quality import CompressionQuality, GradientCompressionQuality
from closeranks.run.components.sync.gradient_sync import GradientSync
from closeranks.run.components.sync.kept_tables import KeptTables, TableBuilder
from closeranks.run.components.sync.local_sgd import LocalSgd
from closeranks.run.components.sync.parameter_servers import ParameterServers
from closeranks.run.components.sync.rebalancing import Rebalancing
from closeranks.run.components.unused_parameters import UnusedParameters
from closeranks.run.job.batch_history import BatchHistory
from closeranks.run.job.job import Job, check_workers, layout_for, micro_batch_size, profile_warning
from closeranks.run.state.state import RunState
from closeranks.run.step.engine import Engine
from closeranks.run.step.step_timer import StepTimer, make_stopwatch
from closeranks.run.worker import excepthook, generation_cache
from closeranks.run.worker.agent_client import current_agent_client, current_link
from closeranks.run.worker.collective_hooks import label_groups
from closeranks.run.worker.rendezvous import make_store
from closeranks.sync.local_sgd import replica_groups
from closeranks.sync.local_sgd.sync_schedule import SyncSchedule
from closeranks.sync.reducers.bucket_tuning import (
    BackwardWork,
    BucketTuning,
    backward_s,
    gradient_bytes,
    tune_bucket_size,
)
from closeranks.sync.server.roles import roles
from closeranks.telemetry.config import TelemetryConfig


def choose_bucket_size(
    job: Job,
    layout: Layout,
    groups: MeshGroups,
    spec: ModelSpec,
    held: Sequence[LocalParameter],
    measured_flops: float,
    device: torch.device,
) -> BucketTuning:
    if groups.data.size == 1 or layout.zero == 3:
        return BucketTuning()
    if not isinstance(job.sync.bucket_mib, str):
        return BucketTuning(job.sync.bucket_mib)
    if cached := generation_cache.bucket_mib():
        return BucketTuning(cached)
    items = micro_batch_size(job) * spec.items_per_sample
    flops = spec.flops_per_item * items / (layout.tensor * layout.pipeline)
    behind_s = backward_s(flops, measured_flops) if job.sync.overlap else 0.0
    return tune_bucket_size(groups.data, groups.world, device, BackwardWork(gradient_bytes(held), behind_s))


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a job file or a user's Python names: the model's spec, the training data and the evaluation data."""

    spec: ModelSpec
    source: DataSource
    eval_source: DataSource | None


@dataclass(frozen=True, slots=True)
class BuiltRun:
    """A run that is built and has not started."""

    engine: Engine
    state: RunState
    eval_source: DataSource | None
    warnings: tuple[str, ...]
    started_fields: Mapping[str, Any]
    """Fields of ``RunStarted`` that were measured or chosen while building."""


def build(
    job: Job,
    world: World,
    inputs: RunInputs,
    find_history: Callable[[RankGroup], BatchHistory] = lambda _: BatchHistory(),
) -> BuiltRun:
    """``find_history``: collective that returns what earlier parts of the run fixed; called only for a resumed job,
    once the group has formed."""
    is_new = not job.checkpoint.resume
    planned = _plan(job, world, inputs, BatchHistory()) if is_new else None
    device = choose_device(job, world)
    hook = sys.excepthook
    with track_sockets():
        world_group = open_world_group(world, device, lambda: make_store(world, current_link()), job.run.timeout_s)
    label_groups(world_group.group)
    excepthook.replace_torch_hook(hook, world.size)
    try:
        planned = planned or _plan(job, world, inputs, find_history(world_group.group))
        return _build(planned, world, inputs, device, world_group)
    except BaseException:
        world_group.close()
        raise


class _Plan(NamedTuple):
    """Everything that is decided before the build starts."""

    job: Job
    layout: Layout
    num_replicas: int
    schedule: BatchSchedule


def _plan(job: Job, world: World, inputs: RunInputs, history: BatchHistory) -> _Plan:
    job = history.apply_to(job)
    problems = check_workers(job, world.size)
    if problems:
        raise ConfigError(problems)
    schedule = batch_schedule(job, len(inputs.source), history.ends)
    layout = layout_for(job, world.size)
    num_hosts = len(set(world.hosts)) or max(1, world.size // max(1, world.local_size))
    num_replicas = replica_groups.num_replica_groups(job.sync, layout, num_hosts)
    layout = replica_groups.shard_within_replica_group(layout, num_replicas)
    check_last_step(job, schedule, layout.data)
    return _Plan(job, layout, num_replicas, schedule)


def _build(planned: _Plan, world: World, inputs: RunInputs, device: torch.device, world_group: WorldGroup) -> BuiltRun:
    job, layout, num_replicas, schedule = planned
    spec, precision, num_steps = inputs.spec, Precision(job.train.precision), schedule.num_steps
    # All ranks of a host measure at the same time, as they will compute, and before the model takes memory.
    measured_flops = generation_cache.matmul_flops(device, precision.compute)
    with track_sockets():
        groups = open_mesh_groups(world_group.group, layout, device, job.run.timeout_s, num_replicas)
    label_groups(groups.world, groups)
    world_group.closers.append(groups.close)
    grouping, flops = ParameterGrouping(job.optim), make_model_flops(job, world, spec, device)
    tables = TableBuilder(job, spec, device)
    applied = parallelize_job(job, layout, spec, groups, device, tables, preparation(grouping, flops, tables))
    chosen = choose_reduction(job, layout, groups, world, num_steps)
    # Made before the reducer: its hooks must see each gradient before the reducer's hooks take it away.
    trained = (held.parameter for held in applied.held)
    noise = GradientNoiseScale(job.train.noise_every, trained, schedule, groups.replica_group.data, device)
    buckets = choose_bucket_size(job, layout, groups, spec, applied.held, measured_flops, device)
    sync_schedule = SyncSchedule.from_config(job.sync, num_steps)
    reducer = make_reducer(job, layout, groups, applied, chosen.reductions, buckets.bucket_mib, sync_schedule)
    quality = CompressionQuality(chosen.compression, groups.world, device, emits=world.is_lead)
    owners = open_owners(job, groups)
    optimizer = make_optimizer(job, layout, owners, reducer, grouping, num_steps)
    step_timer = make_step_timer(job, layout, groups, reducer, device, world_group)
    context = RunContext(job, world, layout, device, groups, world_group, schedule, sync_schedule, step_timer)
    model = Model(spec, applied, precision, context, saves_trained=sync_schedule.num_fragments == 1)
    gradients = make_gradient_sync(reducer, chosen)
    batches = make_batches(job, inputs, schedule, groups, device, even=reducer.needs_equal_counts)
    unused = make_unused_parameters(groups, applied, grouping, optimizer, reducer, num_steps, device)
    loss_scale = LossScale(job.optim.loss_scale, enabled=precision.scales_loss, device=device)
    strategy = make_strategy(context, model, reducer, optimizer, batches, owners)
    own: list[Component | None] = [  # in the order in which the step and the state go through them
        KeptTables(context, tables.tables, optimizer, precision.weights) if job.optim.tables.is_on else None,
        model,
        RunningStatistics(applied.statistics) if any(applied.statistics) else None,
        gradients,
        OptimizerStep(optimizer, job.optim.name, model, reducer, unused),
        LossScaling(loss_scale, groups) if precision.scales_loss else None,
        strategy,
        Ema(job.optim.ema, model, reducer) if job.optim.ema else None,
        Rebalancing(context, batches) if batches.num_shares and strategy is None else None,
        batches,
        noise if job.train.noise_every else None,
        GradientCompressionQuality(quality, reducer) if quality.plan else None,
        unused,
    ]
    components = Components(one for one in own if one is not None)
    add_recorders(components, job.telemetry, world, model, reducer, flops)
    vote = strategy.vote if strategy else Vote(groups.world, spec.metrics, clip=job.optim.clip)
    engine = Engine(context, model, reducer, loss_scale, batches, vote, components)
    return BuiltRun(
        engine=engine,
        state=RunState(
            context, model, components, _identity(job, inputs.source, batches), strategy.replica if strategy else None
        ),
        eval_source=inputs.eval_source,
        warnings=(*applied.warnings, *_warnings(job, world, layout, num_steps, device)),
        started_fields=_started(job, inputs, measured_flops, buckets),
    )


def _started(job: Job, inputs: RunInputs, measured_flops: float, buckets: BucketTuning) -> dict[str, Any]:
    """Fields of ``RunStarted``."""
    evaluates = inputs.eval_source is not None and job.train.eval_every > 0
    return {
        "target_loss": job.telemetry.target_loss,
        "target_of": "evaluation" if evaluates else "training",
        "measured_flops": measured_flops,
        "bucket_mib": buckets.bucket_mib,
        "link_latency_s": buckets.link.latency_s if buckets.link else None,
        "link_bytes_per_s": buckets.link.bytes_per_s if buckets.link else None,
    }


def _warnings(job: Job, world: World, layout: Layout, num_steps: int, device: torch.device) -> Iterator[str]:
    """Warnings about the choices that were made."""
    yield from filter(
        None,
        (
            lr_scaling_warning(job.optim, job.train.global_batch, num_steps),
            tensor_axis_warning(layout, _hosts_of(world)),
            profile_warning(job, num_steps),
            zero_warning(job, layout),
            rebalance_warning(job, layout, device),
        ),
    )


def _hosts_of(world: World) -> Sequence[int]:
    """The host of each rank. If the launcher does not say, every host has as many ranks as this one."""
    return world.hosts or [rank // max(1, world.local_size) for rank in range(world.size)]


def _identity(job: Job, source: DataSource, batches: Batches) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run."""
    return {
        "data": source.identity,
        "num_samples": len(source),
        "seed": job.run.seed,
        "order": batches.order_signature,
        "global_batch": job.train.global_batch,
        "precision": job.train.precision,
    }


def open_owners(job: Job, groups: MeshGroups) -> RankGroup:
    """The ranks among which the optimizer's state is split: those of one replica, or the servers. Collective."""
    if not job.sync.server.is_on:
        return groups.replica_group.world
    ranks, num_workers = range(groups.data.size), roles(job.sync, groups.data.size).num_workers
    return groups.open_group([ranks[:num_workers], ranks[num_workers:]])


def make_gradient_sync(reducer: Reducer, chosen: ReductionChoice) -> GradientSync:
    return GradientSync(
        reducer,
        is_compressed=chosen.compression is not None,
        recompresses_sums=chosen.recompresses_sums,
        summary=chosen.summary,
    )


def make_strategy(
    context: RunContext,
    model: Model,
    reducer: Reducer,
    optimizer: Optimizer,
    batches: Batches,
    owners: RankGroup,
) -> LocalSgd | ParameterServers | None:
    """What replaces the vote of all ranks on every step; None: nothing does."""
    sync = context.job.sync
    if sync.local.is_on:
        return LocalSgd(context, model, reducer, batches)
    if sync.server.backup:
        return BackupWorkers(context, model, reducer, optimizer, owners, batches)
    return ParameterServers(context, model, reducer, optimizer, owners) if sync.server.is_on else None


def make_optimizer(
    job: Job, layout: Layout, owners: RankGroup, reducer: Reducer, grouping: ParameterGrouping, num_steps: int
) -> Optimizer:
    return Optimizer(
        reducer.parameter_shards(),
        grouping.assignment,
        with_scaled_lr(job.optim, job.train.global_batch),
        num_steps=num_steps,
        frozen_from=freeze_step(job, layout, num_steps),
        total=owners.sum if layout.zero or layout.tensor > 1 else None,
    )


def make_unused_parameters(
    groups: MeshGroups,
    applied: DistributedModel,
    grouping: ParameterGrouping,
    optimizer: Optimizer,
    reducer: Reducer,
    num_steps: int,
    device: torch.device,
) -> UnusedParameters:
    return UnusedParameters(
        [name for group in grouping.assignment.groups for name in group.names],
        (held.piece.name for held in applied.held if held.parameter.requires_grad),
        num_voters=groups.replica_group.world.size,
        num_ranks=groups.world.size,
        device=device,
        can_gate=optimizer.can_gate,
        num_steps=num_steps,
        absent=reducer.unused_parameters,
    )


def parallelize_job(
    job: Job,
    layout: Layout,
    spec: ModelSpec,
    groups: MeshGroups,
    device: torch.device,
    tables: TableBuilder,
    prepare: Callable[[nn.Module], None],
) -> DistributedModel:
    with tables.building():
        return parallelize(spec, parallel_settings(job, layout), groups, device, prepare=prepare)


def preparation(
    grouping: ParameterGrouping, flops: ModelFlops | None, tables: TableBuilder
) -> Callable[[nn.Module], None]:
    """What needs the whole model, before any transform."""

    def prepare(module: nn.Module) -> None:
        tables.check(module)
        grouping.assign_groups(module)
        if flops is not None:
            flops.copy(module)

    return prepare


def add_recorders(
    components: Components,
    telemetry: TelemetryConfig,
    world: World,
    model: Model,
    reducer: Reducer,
    flops: ModelFlops | None,
) -> None:
    """What is measured of the steps and of the resources that they use."""
    if flops is not None:
        components.add(flops)
    if telemetry.phases:
        components.add(PhaseRecorder(model.device, telemetry))
    if telemetry.sample_s:
        components.add(ResourceUse(world, model.device, telemetry.sample_s))
        components.add(MemoryRecorder(components, model, reducer))


def make_step_timer(
    job: Job, layout: Layout, groups: MeshGroups, reducer: Reducer, device: torch.device, world_group: WorldGroup
) -> StepTimer:
    is_independent = layout.tensor * layout.pipeline == 1 and not reducer.needs_equal_counts
    is_independent &= not (job.optim.tables.is_on and job.sync.server.is_on)  # workers wait for rows within a forward
    stopwatch = make_stopwatch(device, is_independent=is_independent and job.layout.batch_norm != "sync")
    step_timer = StepTimer(
        current_agent_client(), stopwatch, pipeline_rank=groups.pipeline.rank, is_even=layout.pipeline == 1
    )
    world_group.closers.append(step_timer.close)
    return step_timer


def make_batches(
    job: Job, inputs: RunInputs, schedule: BatchSchedule, groups: MeshGroups, device: torch.device, *, even: bool
) -> Batches:
    source, sources = inputs.source, (inputs.source, inputs.eval_source)
    workers = roles(job.sync, groups.data.size)
    order, quarantine = order_of(job.data, as_loader_source(source), job.run.seed), Quarantine(job.data.max_bad)
    loader = Loader(
        source,
        order,
        schedule,
        data_rank=workers.worker_rank(groups.data.rank),
        data_size=workers.num_workers,
        device=device,
        settings=ReadSettings.of(job.data),
        even=even,
        quarantine=quarantine,
    )
    opened = tuple(as_loader_source(each) for each in sources if each is not None)
    check_dataset_lengths(groups.world.all_gather_text(str(order.num_samples)), opened[0].identity)
    return Batches(
        loader,
        quarantine,
        order,
        groups,
        sources=opened,
        logs_samples=job.data.log_samples,
        must_agree=job.data.on_bad == "skip" and groups.tensor.size * groups.pipeline.size > 1,
        num_shares=_num_shares(job, groups),
        returned=ReturnedMicroBatches(schedule, workers.num_workers) if job.sync.server.backup else None,
        worker=workers.worker_rank(groups.data.rank),
    )


def _num_shares(job: Job, groups: MeshGroups) -> int:
    """Among how many replicas or data ranks micro-batches are divided by speed; 0: evenly."""
    if job.elastic.stragglers == "rebalance":
        return groups.data.size if groups.data.size > 1 else 0
    count = groups.replica_group.count
    return count if replica_groups.is_balanced(job.sync, count) else 0


def zero_warning(job: Job, layout: Layout) -> str:
    if not job.layout.zero or layout.data > 1:
        return ""
    return (
        f"layout.zero = {job.layout.zero} shards state over data ranks; with one data rank it has no effect: "
        "use zero = 0, or more workers"
    )


def rebalance_warning(job: Job, layout: Layout, device: torch.device) -> str:
    """Where ``elastic.stragglers = "rebalance"`` can do nothing."""
    if job.elastic.stragglers != "rebalance":
        return ""
    if layout.data == 1:
        return "elastic.stragglers = 'rebalance' has no effect with one data rank: use 'report', or more data ranks"
    if device.type == "cuda" and (layout.zero == 3 or layout.tensor * layout.pipeline > 1):
        what = "on this device a rank's own time cannot be told from waiting for others inside the forward"
        return (
            f"elastic.stragglers = 'rebalance' has no effect: {what}. Use zero = 0 to 2 without other axes, or 'evict'"
        )
    return ""

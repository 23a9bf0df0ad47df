"""Which parts make up a run, and how are they introduced to each other?

``assemble`` is the one place where rooms meet: it opens the group, applies the layout to the model and hands each part
what it needs. It decides nothing: choices stand in the job, arithmetic in the rooms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from closeranks.core.descriptors import own_sockets
from closeranks.core.environment import gpus_are_per_task
from closeranks.core.errors import ConfigError, Problem, SetupError
from closeranks.core.events import Event, StepDone
from closeranks.core.protocols import ModelSpec, Reducer, Source
from closeranks.core.world import World
from closeranks.data.cursor import Cursor
from closeranks.data.loader import Loader
from closeranks.data.order import MicroBatch, Schedule
from closeranks.data.orders import order_of
from closeranks.data.quarantine import Quarantine
from closeranks.data.settings import ReadSettings
from closeranks.data.source import placed
from closeranks.elastic.vote import Verdict, Vote
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import tensor_crossing
from closeranks.optim.optimizer import Optimizer
from closeranks.optim.scaler import LossScale
from closeranks.optim.scaling import rate_warning, scaled
from closeranks.parallel.apply import Applied, apply
from closeranks.parallel.batchnorm import BatchStatistics
from closeranks.parallel.group import Group, OpenedGroup, open_group
from closeranks.parallel.mesh import Groups, open_groups
from closeranks.parallel.pipeline import Pipeline
from closeranks.parallel.precision import Precision
from closeranks.run import excepthook, heirloom
from closeranks.run.accuracy import Accuracy
from closeranks.run.apart import hosts_of, make_outer, make_vote, num_hosts, rounds_of
from closeranks.run.bucketing import buckets_for
from closeranks.run.distribute import Freezing, make_reducer, wishes_of
from closeranks.run.job import (
    Job,
    check_workers,
    homes_of,
    layout_for,
    micro_batch_size,
    profile_warning,
    within_homes,
)
from closeranks.run.noise import NoiseGauge
from closeranks.run.overseer import current_link, current_overseer
from closeranks.run.pace import Pace, stopwatch
from closeranks.run.past import Past
from closeranks.run.store import make_store
from closeranks.run.supply import Supply, check_lengths
from closeranks.run.usage import Usage
from closeranks.run.ways import choose_ways, frozen_from, outer_plan
from closeranks.sync.outer import Outer
from closeranks.sync.rounds import Rounds
from closeranks.sync.tuning import Tuned


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a job or a user's Python names: the model's spec, what it learns from and what it is judged on."""

    spec: ModelSpec
    source: Source
    eval_source: Source | None


Watcher = Callable[[int, Verdict], None]
"""Told of each step between the vote and the update, while the gradients stand."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a step needs, assembled."""

    job: Job
    world: World
    layout: Layout
    device: torch.device
    precision: Precision
    spec: ModelSpec
    module: nn.Module
    """This rank's part of the model."""
    pipeline: Pipeline | None
    applied: Applied
    opened: OpenedGroup
    groups: Groups
    statistics: tuple[BatchStatistics, ...]
    reducer: Reducer
    has_owners: bool
    """Whether sums of gradients are coded once more by who owns them, [Note: two shots]."""
    sync_words: str
    """How gradients travel, where there is something to say about it."""
    rounds: Rounds
    outer: Outer | None
    """What replicas that train apart do when they meet; None where nobody does."""
    vote: Vote
    optimizer: Optimizer
    loss_scale: LossScale
    loss_divisor: float
    """Losses are sums: divided by a micro-batch's size, they stay within fp16's range under the scale."""
    schedule: Schedule
    source: Source
    supply: Supply
    eval_source: Source | None
    warnings: tuple[str, ...]
    measured_flops: float
    """What a matrix product reached on this device before the model was built."""
    buckets: Tuned
    """In what portions gradients travel."""
    watchers: list[Watcher]
    before_vote: list[Callable[[], None]]
    """What must be over on this rank before it votes on a step: the vote tells all ranks that it is."""
    pace: Pace
    noise: NoiseGauge
    accuracy: Accuracy
    usage: Usage

    def settle(self, done: StepDone, used: Sequence[float], emit: Callable[[Event], None]) -> None:
        """All ranks, when the account of a step is read; ``used``: what ``usage`` gave to the vote, summed."""
        self.usage.settle(done, used, emit)
        self.supply.settle(done, emit)
        self.noise.settle(done, emit)
        self.accuracy.settle(done, emit)

    @property
    def speaks(self) -> bool:
        """Whether this rank reports losses: one of those that computed the same one (the last stage alone has any)."""
        return self.groups.tensor.rank == 0

    @property
    def remembers(self) -> bool:
        """Whether each rank holds something of the state that no other does: what compression left unsent."""
        return self.accuracy.plan is not None

    @property
    def is_spread(self) -> bool:
        """Whether no rank holds the whole state."""
        return self.layout.zero > 0 or self.layout.tensor > 1 or self.layout.pipeline > 1

    def assigned(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step."""
        return self.supply.loader.assigned(step)


def choose_device(job: Job, world: World) -> torch.device:
    """An accelerator per worker where the job and the host allow it."""
    available = torch.cuda.device_count() if job.run.device != "cpu" else 0
    index = device_index(job.run.device, world, available, is_own=gpus_are_per_task())
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_index(wanted: str, world: World, available: int, *, is_own: bool = False) -> int | None:
    """Which of the visible CUDA devices this worker takes; None: the CPU.

    ``is_own``: Slurm shows each task its own device alone (``--gpus-per-task``), which is then number 0 to everybody.
    """
    if is_own and available == 1:
        return 0
    if wanted == "cuda" and available <= world.local_rank:
        what = f"run.device = 'cuda', but worker {world.local_rank} of this host finds {available} CUDA devices"
        raise SetupError(what, "Start fewer workers, or set run.device = 'auto'.", rank=world.rank)
    return world.local_rank if available >= world.local_size else None


def assemble(
    job: Job, world: World, ingredients: Ingredients, recall: Callable[[Group], Past] = lambda _: Past()
) -> Parts:
    """``recall``: what the job fixed when it ran before, agreed on by all ranks; asked only of a job that is resumed,
    once the ranks have met."""
    is_new = not job.checkpoint.resume
    planned = _plan(job, world, ingredients, Past()) if is_new else None
    device = choose_device(job, world)
    hook = sys.excepthook
    with own_sockets():
        opened = open_group(world, device, lambda: make_store(world, current_link()), job.run.timeout_s)
    excepthook.settle(hook, world.size)
    try:
        planned = planned or _plan(job, world, ingredients, recall(opened.group))
        return _build(planned, world, ingredients, device, opened)
    except BaseException:
        opened.close()
        raise


class _Plan(NamedTuple):
    """What is decided before anything is built."""

    job: Job
    layout: Layout
    num_homes: int
    schedule: Schedule


def _plan(job: Job, world: World, ingredients: Ingredients, past: Past) -> _Plan:
    job = past.applied_to(job)
    problems = check_workers(job, world.size)
    if problems:
        raise ConfigError(problems)
    schedule = schedule_of(job, len(ingredients.source), past.ends)
    layout = layout_for(job, world.size)
    num_homes = homes_of(job, layout, num_hosts(world))
    layout = within_homes(layout, num_homes)
    check_last_step(job, schedule, layout.data)
    return _Plan(job, layout, num_homes, schedule)


def _build(planned: _Plan, world: World, ingredients: Ingredients, device: torch.device, opened: OpenedGroup) -> Parts:
    job, layout, num_homes, schedule = planned
    spec, precision = ingredients.spec, Precision(job.train.precision)
    # All ranks of a host measure at once, as they will compute; before the model takes memory.
    measured_flops = heirloom.matmul_flops(device, precision.compute)
    with own_sockets():
        groups = open_groups(opened.group, layout, device, job.run.timeout_s, num_homes)
    opened.closers.append(groups.close)
    frozen = Freezing(job.optim)
    applied = apply(spec, wishes_of(job, layout), groups, device, prepare=frozen.decide)
    chosen = choose_ways(job, layout, groups, world, schedule.num_steps)
    # Its hooks see gradients before the reducer's, which are made after them, take those away.
    trained = (held.parameter for held in applied.held)
    noise = NoiseGauge(job.train.noise_every, trained, schedule, groups.home.data, device)
    buckets = buckets_for(job, layout, groups, spec, applied.held, measured_flops, device)
    reducer = make_reducer(job, layout, groups, applied, chosen.ways, buckets.bucket_mib)
    outer = outer_plan(job, groups.home.across, schedule.num_steps)
    accuracy = Accuracy(chosen.plan, outer, reducer, groups.world, device, tells=world.is_lead)
    optimizer = make_optimizer(job, layout, groups, reducer, frozen, schedule.num_steps)
    crossing = tensor_crossing(layout, hosts_of(world))
    rate = rate_warning(job.optim, job.train.global_batch, schedule.num_steps)
    warnings = (rate, crossing, profile_warning(job, schedule.num_steps), zero_note(job, layout))
    return Parts(
        job=job,
        world=world,
        layout=layout,
        device=device,
        precision=precision,
        spec=spec,
        module=applied.module,
        pipeline=applied.pipeline,
        applied=applied,
        opened=opened,
        groups=groups,
        statistics=applied.statistics,
        reducer=reducer,
        has_owners=chosen.has_owners,
        sync_words=chosen.words,
        rounds=rounds_of(job, schedule.num_steps),
        outer=make_outer(job, groups, spec, applied, reducer, schedule.num_steps),
        vote=make_vote(job, groups, spec),
        optimizer=optimizer,
        loss_scale=LossScale(job.optim.loss_scale, enabled=precision.scales_loss, device=device),
        loss_divisor=loss_divisor(spec, schedule.micro_batch) if precision.scales_loss else 1.0,
        schedule=schedule,
        source=ingredients.source,
        supply=make_supply(job, ingredients, schedule, groups, device, even=reducer.needs_equal_counts),
        eval_source=ingredients.eval_source,
        warnings=(*applied.warnings, *filter(None, warnings)),
        measured_flops=measured_flops,
        buckets=buckets,
        watchers=[noise.watch, accuracy.watch],
        before_vote=[],
        pace=make_pace(job, layout, groups, reducer, device, opened),
        noise=noise,
        accuracy=accuracy,
        usage=make_usage(groups, applied, frozen, optimizer, schedule.num_steps, device),
    )


def make_optimizer(
    job: Job, layout: Layout, groups: Groups, reducer: Reducer, frozen: Freezing, num_steps: int
) -> Optimizer:
    return Optimizer(
        reducer.leaves(),
        frozen.assignment,
        scaled(job.optim, job.train.global_batch),
        num_steps=num_steps,
        frozen_from=frozen_from(job, layout, num_steps),
        total=groups.home.world.sum if layout.zero or layout.tensor > 1 else None,
    )


def make_usage(
    groups: Groups, applied: Applied, frozen: Freezing, optimizer: Optimizer, num_steps: int, device: torch.device
) -> Usage:
    return Usage(
        [name for group in frozen.assignment.groups for name in group.names],
        (held.piece.name for held in applied.held if held.parameter.requires_grad),
        num_voters=groups.home.world.size,
        num_ranks=groups.world.size,
        device=device,
        can_gate=optimizer.can_gate,
        num_steps=num_steps,
    )


def make_pace(
    job: Job, layout: Layout, groups: Groups, reducer: Reducer, device: torch.device, opened: OpenedGroup
) -> Pace:
    is_apart = layout.tensor * layout.pipeline == 1 and not reducer.needs_equal_counts
    watch = stopwatch(device, is_apart=is_apart and job.layout.batch_norm != "sync")
    pace = Pace(current_overseer(), watch, lane=groups.pipeline.rank, is_even=layout.pipeline == 1)
    opened.closers.append(pace.close)
    return pace


def make_supply(
    job: Job, ingredients: Ingredients, schedule: Schedule, groups: Groups, device: torch.device, *, even: bool
) -> Supply:
    source, sources = ingredients.source, (ingredients.source, ingredients.eval_source)
    order, quarantine = order_of(job.data, placed(source), job.run.seed), Quarantine(job.data.max_bad)
    loader = Loader(
        source,
        order,
        schedule,
        data_rank=groups.data.rank,
        data_size=groups.data.size,
        device=device,
        settings=ReadSettings.of(job.data),
        even=even,
        quarantine=quarantine,
    )
    opened = tuple(placed(each) for each in sources if each is not None)
    check_lengths(groups.world.gather_text(str(order.num_samples)), opened[0].identity)
    return Supply(
        loader,
        quarantine,
        order,
        groups,
        sources=opened,
        logs_samples=job.data.log_samples,
        must_agree=job.data.on_bad == "skip" and groups.tensor.size * groups.pipeline.size > 1,
        is_balanced=job.sync.local.is_on and job.sync.local.balance and groups.home.count > 1,
    )


def schedule_of(job: Job, num_samples: int, ends: tuple[Cursor, ...] = ()) -> Schedule:
    """How the run's positions fall into steps, from either way of giving its length. ``ends``: of earlier parts."""
    train, micro = job.train, micro_batch_size(job)
    if train.epochs is not None:
        return Schedule.for_epochs(num_samples, train.global_batch, micro, train.epochs, ends)
    return Schedule.for_steps(num_samples, train.global_batch, micro, train.steps or 1, ends)


def zero_note(job: Job, layout: Layout) -> str:
    if not job.layout.zero or layout.data > 1:
        return ""
    return (
        f"layout.zero = {job.layout.zero} shards state over data ranks; with one data rank it has no effect: "
        "use zero = 0, or more workers"
    )


def check_last_step(job: Job, schedule: Schedule, num_ranks: int) -> None:
    """Synchronised batch norm meets all ranks in every forward: where one has a micro-batch more, it would wait."""
    num_micro = schedule.num_micro_batches(schedule.num_steps - 1)
    if job.layout.batch_norm == "sync" and num_micro % num_ranks:
        what = f"synchronised batch norm, but the last step's {num_micro} micro-batches do not divide evenly among "
        what += f"{num_ranks} data ranks"
        raise ConfigError(
            [Problem("layout.batch_norm", what, "Give train.steps instead of epochs: all are then full.")]
        )


def loss_divisor(spec: ModelSpec, micro_batch: int) -> float:
    """The next power of two above a micro-batch's items: dividing by it rounds nothing."""
    return float(1 << (micro_batch * spec.items_per_sample - 1).bit_length())

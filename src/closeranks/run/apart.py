"""What does a run do for replicas that train apart?

Introduces ``sync.rounds``, ``sync.outer`` and ``elastic.apart`` to the parts of a run, and says in words what they do.
Which state belongs to one replica alone, and how it is saved, stands in ``run.rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from closeranks.agent.progress import Phase
from closeranks.core.errors import ConfigError, Problem
from closeranks.core.protocols import ModelSpec, Reducer
from closeranks.core.world import World
from closeranks.elastic.apart import ApartVote
from closeranks.elastic.vote import Vote
from closeranks.parallel.apply import Applied, is_sharded
from closeranks.parallel.mesh import Groups
from closeranks.run.job import Job
from closeranks.run.ways import must_be_exact, outer_ways
from closeranks.sync.balance import even_shares, rebalanced
from closeranks.sync.config import LocalConfig
from closeranks.sync.outer import Outer, OuterRule
from closeranks.sync.rounds import Rounds, part
from closeranks.sync.ways import flat_ways

if TYPE_CHECKING:
    from closeranks.run.parts import Parts


def num_hosts(world: World) -> int:
    return len(set(world.hosts)) or max(1, world.size // max(1, world.local_size))


def hosts_of(world: World) -> Sequence[int]:
    """Of each rank, its host; where the launcher does not say, as many to a host as there are on this one."""
    return world.hosts or [rank // max(1, world.local_size) for rank in range(world.size)]


def rounds_of(job: Job, num_steps: int) -> Rounds:
    local = job.sync.local
    return Rounds(local.every, local.fragments if local.is_on else 1, num_steps)


def make_vote(job: Job, groups: Groups, spec: ModelSpec) -> Vote:
    if not job.sync.local.is_on:
        return Vote(groups.world, spec.metrics, clip=job.optim.clip)
    home = groups.home
    return ApartVote(
        home.world, groups.world, spec.metrics, clip=job.optim.clip, num_homes=home.count, speaks=home.world.rank == 0
    )


def make_outer(
    job: Job, groups: Groups, spec: ModelSpec, applied: Applied, reducer: Reducer, num_steps: int
) -> Outer | None:
    local = job.sync.local
    if not local.is_on:
        return None
    sizes = {name: prod(shape) for name, shape in applied.shapes.items() if name in applied.trainable}
    if local.fragments > len(sizes):
        what = f"the model's {len(sizes)} trained parameters cannot be cut into {local.fragments} fragments"
        raise ConfigError([Problem("sync.local.fragments", what, f"Set it to {len(sizes)} or less.")])
    whole = {one.piece.name for one in applied.held if groups.mesh.layout.zero == 3 and not is_sharded(one)}
    shared = {held.piece.name for held in applied.held if held.aliases and groups.pipeline.size > 1}
    return Outer(
        reducer.leaves(),
        part(sizes, spec.blocks, local.fragments),
        OuterRule(local.outer_lr, local.outer_momentum, local.nesterov),
        groups.home.count,
        outer_ways(job, groups.home.across, num_steps),
        flat_ways(groups.home.across),
        exact=whole | {one.piece.name for one in applied.held if must_be_exact(groups.mesh.layout, one)},
        alone=whole | shared,
    )


def meet(parts: Parts, step: int) -> None:
    """After the inner update of ``step``, before leaves are spread: where replicas meet now, they become one again."""
    if parts.outer is None or not parts.rounds.is_meeting(step):
        return
    parts.pace.enter(Phase.MEET)
    shares, home = parts.supply.loader.shares, parts.groups.home
    parts.outer.meet(step, parts.rounds.fragments(step), shares[home.number] / sum(shares) if shares else None)
    parts.accuracy.measure(step, parts.outer.losses())
    for statistics in parts.statistics:
        statistics.average(home.across)
    if parts.supply.is_balanced and step < parts.rounds.num_steps:
        _rebalance(parts, step)


def _rebalance(parts: Parts, step: int) -> None:
    """All ranks: what each took for a micro-batch in the round that is over; a replica is as slow as its slowest."""
    home, world = parts.groups.home, parts.groups.world
    told = torch.zeros(home.count, world.size, dtype=torch.float64, device=parts.device)
    told[home.number, world.rank] = parts.pace.pop_own()
    seconds = world.sum(told).amax(1).tolist()
    width = parts.groups.data.size // home.count
    shares = parts.supply.loader.shares or even_shares(parts.schedule.num_micro_batches(0), home.count, width)
    now = rebalanced(shares, seconds, width)
    if now != shares:
        parts.supply.reshare(now, step)


def words(local: LocalConfig, num_homes: int) -> str:
    """``2 replicas train apart and meet every 32 steps: DiLoCo, outer lr 0.7, momentum 0.9``; empty where none do."""
    if not local.is_on:
        return ""
    who = f"{num_homes} replicas train apart and meet" if num_homes > 1 else "1 replica meets itself"
    when = f"every {local.every} steps" if local.every > 1 else "after every step"
    if local.fragments > 1:
        when += f", one of {local.fragments} fragments every {local.every // local.fragments}"
    return f"{who} {when}: {rule_in_words(local)}"


def rule_in_words(local: LocalConfig) -> str:
    if local.outer_momentum == 0 and local.outer_lr == 1:
        return "local SGD, a plain mean"
    name = "streaming DiLoCo" if local.fragments > 1 else "DiLoCo"
    momentum = f"momentum {local.outer_momentum:g}" + ("" if local.nesterov else " without Nesterov")
    return f"{name}, outer lr {local.outer_lr:g}, {momentum if local.outer_momentum else 'no momentum'}"

"""Chooses the reduction algorithm for this job's gradients.

The choice follows from the job's ``[sync]`` table and the hosts of the ranks: one all-reduce over all ranks, or a
hierarchical one inside and across hosts; compressed or not. It is described in a sentence. Invariant: all ranks choose
the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.protocols import LocalParameter
from closeranks.core.world import World
from closeranks.facts.communication.collective_algorithms import Topology
from closeranks.facts.communication.collective_cost import inter_host_bytes
from closeranks.facts.layout import Layout
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.parallel.process_group import RankGroup
from closeranks.run.job.job import Job
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.collectives.reductions import (
    FlatReduction,
    HierarchicalReduction,
    ReductionFactory,
    plain_reductions,
)
from closeranks.sync.compress.build import compressed_reductions, describe_compression
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.config import CompressConfig, SyncConfig
from closeranks.sync.server.compressed_push import PushCompression


@dataclass(frozen=True, slots=True)
class ReductionChoice:
    """The reduction algorithm; ``reductions`` None: torch's own collectives."""

    reductions: ReductionFactory | None
    summary: str
    """For people; empty for the usual reduction."""
    recompresses_sums: bool = False
    """Whether the owner of each sum compresses it again."""
    compression: CompressionSchedule | None = None
    """When gradients are compressed; None: never."""


def choose_reduction(job: Job, layout: Layout, groups: MeshGroups, world: World, num_steps: int) -> ReductionChoice:
    """Collective if there are several hosts: it creates process groups."""
    config = job.sync.gradients
    if layout.data == 1:
        return ReductionChoice(None, "")
    compression = compression_schedule(config, num_steps)
    if job.sync.server.is_on:
        pushes = push_compression(job.sync, num_steps)
        return ReductionChoice(None, "", compression=pushes.schedule if pushes else None)
    levels = _levels(job, layout, groups, world)
    group = groups.data if layout.zero == 0 else groups.replica if groups.replica.size > 1 else groups.shard
    if config.name == "none":
        if levels is None:
            return ReductionChoice(None, "")
        inside, across = levels
        return ReductionChoice(_hierarchical(inside, plain_reductions(across)), _describe_levels(inside, across))
    if levels is None or config.name == "powersgd":  # which sends so little that hosts do not matter
        scatters = layout.zero > 0 and groups.replica.size == 1
        reductions = compressed_reductions(config, group, compression, scatters=scatters)
        return ReductionChoice(
            reductions,
            describe_compressed_sync(config, compression),
            not scatters and config.name != "powersgd",
            compression,
        )
    inside, across = levels
    reductions = _hierarchical(inside, compressed_reductions(config, across, compression))
    return ReductionChoice(
        reductions,
        f"{_describe_levels(inside, across)}; across hosts, {describe_compressed_sync(config, compression)}",
        True,
        compression,
    )


def compression_schedule(config: CompressConfig, num_steps: int) -> CompressionSchedule:
    return CompressionSchedule(config.num_warmup(num_steps), config.measure_every)


def push_compression(sync: SyncConfig, num_steps: int) -> PushCompression | None:
    """How workers compress what they push to servers; None: not at all. Its error is not measured: that would take a
    collective of all ranks, which need not be at the same step."""
    config = sync.gradients
    if not sync.server.is_on or config.name == "none":
        return None
    return PushCompression(config, CompressionSchedule(config.num_warmup(num_steps)))


def freeze_step(job: Job, layout: Layout, num_steps: int) -> int | None:
    """The step from which only signs are sent and adamw's second moments are frozen, as in 1-bit Adam; None: never."""
    config = job.sync.gradients
    is_adam = config.name == "onebit" and job.optim.name == "adamw" and layout.data > 1
    return config.num_warmup(num_steps) if is_adam else None


def _levels(job: Job, layout: Layout, groups: MeshGroups, world: World) -> tuple[RankGroup, RankGroup] | None:
    """The groups of a hierarchical reduction: this host's part of the data group, and a group with one rank of each
    host. None if the reduction is flat."""
    if layout.zero or not job.sync.may_reduce_by_host or not world.hosts:
        found = None
    else:
        found = groups.across_hosts([world.host_of(rank) for rank in range(world.size)])
    if found is None and job.sync.may_reduce_by_host and job.sync.reduce == "hierarchical":
        what = "a hierarchical sum needs several hosts with the same number of data ranks on each, and more than one"
        if layout.zero:
            what = f"with zero={layout.zero} gradients are scattered, not summed on every rank"
        fix = 'Set sync.reduce = "auto"; with ZeRO, set layout.shard to the data ranks of one host.'
        raise ConfigError([Problem("sync.reduce", what, fix)])
    return found


def _hierarchical(inside: RankGroup, across: ReductionFactory) -> ReductionFactory:
    def make(spec: FlatBufferSpec) -> FlatReduction:
        return HierarchicalReduction(spec, inside, across)

    return make


def must_stay_uncompressed(layout: Layout, one: LocalParameter) -> bool:
    """Whether a parameter must not be compressed. Ranks of other axes than data that hold the same values, or partial
    sums of the same gradient, would diverge: each compresses them together with different neighbouring parameters."""
    is_copied = layout.tensor > 1 and one.piece.is_whole
    return bool(one.partial_over) or not one.is_primary or is_copied


def describe_compressed_sync(config: CompressConfig, compression: CompressionSchedule, what: str = "gradients") -> str:
    """Describes the compression, for people."""
    since = f" after {compression.num_warmup} steps" if compression.num_warmup else ""
    rest = ", with error feedback" if config.feedback else ", without error feedback"
    return f"{describe_compression(config, what)}{since}{rest}"


def _describe_levels(inside: RankGroup, across: RankGroup) -> str:
    topology = Topology(across.size, inside.size)
    share, flat = inter_host_bytes("hierarchical", 1.0, topology), inter_host_bytes("ring", 1.0, topology)
    return (
        f"gradients are summed inside hosts of {inside.size}, then across {across.size}, then gathered inside: "
        f"{share:.2f} times their size crosses between hosts instead of {flat:.2f}"
    )

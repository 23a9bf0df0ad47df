"""Turns a plain module into a distributed one; this file alone decides the order of the transforms.

    1. build          the whole model on the meta device: every name and shape is known, no memory is allocated
    2. prepare        what depends on all names (frozen patterns), while this rank still has all of them
    3. tensor         shards parameters and puts collectives around modules: later steps see ordinary, smaller modules
    4. stages         drops what other pipeline ranks compute; after step 3, since a sharding rule may name any module
    5. batch norm     replaces modules, so it comes before anything that captures them
    6. recompute      wraps blocks; inside compile, so that the compiler sees what is dropped (except ``full``, which
                      wraps the compiled block), and inside FSDP, so that a block is all-gathered before it is
                      recomputed
    7. compile        per block: one graph serves all equal blocks, and start-up does not grow with depth; after every
                      transform that changes a block's forward, before anything that hooks its parameters
    8. shard          FSDP2 (zero=3), per block: its hooks are the outermost, and it shards the final parameters
    9. materialize    memory for what this rank keeps and nothing else, filled from (seed, name) one parameter at a time
    (then, in ``run``: reducer and optimizer, on the resulting parameters)

Invariant: after ``parallelize``, parameters have the names and values that the spec built, whatever was applied; no
rank ever holds more than its own pieces and one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece
from closeranks.core.protocols import SEVERAL_STAGES, LocalParameter, ModelSpec
from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.stages import stage_placement
from closeranks.parallel.batch_norm import BatchStatistics, batch_norm_hint, convert_sync_batch_norm
from closeranks.parallel.fully_shard import shard_fully
from closeranks.parallel.initialization.materialize import BuiltModule, InitTarget, build_module, init_targets, to_empty
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.parallel.pipeline.executor import Pipeline, open_pipeline
from closeranks.parallel.pipeline.stages import RankStages, TiedParameter, split_into_stages, stage_ranges
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.recompute import recompute, recompute_compiled
from closeranks.parallel.tensor.tensor_parallel import TensorShard, shard_module


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """The job's settings for distributing its model."""

    layout: Layout
    hold: str
    """``shards`` or ``step``: how long ZeRO-3 keeps what it gathered."""
    batch_norm: str
    prefetch: int
    overlap: bool
    precision: Precision
    seed: int
    micro_batch: int
    compiled: bool
    recompute: str
    recompute_keep: tuple[str, ...]
    sums_replicas: bool = True
    """With zero=3: whether FSDP2 sums over replicas, or leaves that to the reducer."""


@dataclass(frozen=True, slots=True)
class DistributedModel:
    """This rank's part of the distributed model, and warnings for the user."""

    stages: Mapping[int, nn.Module]
    """By global stage number; without a pipeline there is one, number 0."""
    pipeline: Pipeline | None
    held: tuple[LocalParameter, ...]
    statistics: tuple[BatchStatistics, ...]
    """One for each of this rank's stages."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole model: parameters by their first names, and persistent buffers."""
    trainable: frozenset[str]
    num_params: int
    num_trainable: int
    warnings: tuple[str, ...]

    @property
    def module(self) -> nn.Module:
        """This rank's stages as one module."""
        modules = list(self.stages.values())
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def parallelize(
    spec: ModelSpec,
    settings: ParallelSettings,
    groups: MeshGroups,
    device: torch.device,
    prepare: Callable[[nn.Module], object],
    before_memory: Callable[[], object] = lambda: None,
) -> DistributedModel:
    """``before_memory``: called when nothing but memory is missing, where a dry run begins to pretend."""
    sharded = settings.layout.zero == 3 or groups.tensor.size > 1 or groups.pipeline.size > 1
    dtype = settings.precision.weights
    built = build_module(spec, seed=settings.seed, device=device, dtype=dtype, group=groups.world, sharded=sharded)
    whole = built.module
    prepare(whole)
    names = _Names.of(whole)
    shards = shard_module(whole, spec.sharding_rules, spec.activation_collectives, groups.tensor)
    rank_stages = _split_stages(spec, whole, settings.layout, groups)
    wrapped: set[nn.Module] = set()
    for module in rank_stages.stages.values():
        _transform(spec, module, settings, groups, wrapped)
    # One module, so that a tensor which two stages share stays shared.
    stages = nn.ModuleList(rank_stages.stages.values())
    before_memory()
    if built.is_meta:
        to_empty(stages, device)
    held = tuple(_held(rank_stages, names, shards, _tie_groups(rank_stages.ties, settings.layout, groups), groups))
    if built.is_meta:
        _fill(built, stages, held, groups, device)
    hint = batch_norm_hint(stages, settings.batch_norm, settings.micro_batch, groups.data.size)
    return DistributedModel(
        stages=rank_stages.stages,
        # A backward split into two halves would recompute a block twice.
        pipeline=open_pipeline(
            settings.layout, rank_stages.stages, groups.pipeline, device, splits=settings.recompute == "none"
        ),
        held=held,
        statistics=tuple(BatchStatistics(module, groups.replica_group.data) for module in rank_stages.stages.values()),
        shapes=names.shapes,
        trainable=names.trainable,
        num_params=names.num_params,
        num_trainable=names.num_trainable,
        warnings=tuple(text for text in (hint, built.warning, _idle_recompute(spec, settings)) if text),
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """Names and sizes of the whole model's parameters, recorded before anything is sharded."""

    first: Mapping[str, str]
    """Maps every name of a parameter to its first name: a tied parameter has several names."""
    shapes: Mapping[str, tuple[int, ...]]
    """By first name; persistent buffers too."""
    trainable: frozenset[str]
    num_params: int
    num_trainable: int

    @classmethod
    def of(cls, module: nn.Module) -> _Names:
        owners: dict[nn.Parameter, str] = {}
        named = module.named_parameters(remove_duplicate=False)
        first = {name: owners.setdefault(parameter, name) for name, parameter in named}
        return cls(
            first=first,
            shapes={name: tuple(tensor.shape) for name, tensor in whole_tensors(module)},
            trainable=frozenset(name for parameter, name in owners.items() if parameter.requires_grad),
            num_params=sum(parameter.numel() for parameter in owners),
            num_trainable=sum(parameter.numel() for parameter in owners if parameter.requires_grad),
        )

    def aliases(self, first: str) -> tuple[str, ...]:
        return tuple(name for name, owner in self.first.items() if owner == first and name != first)


def whole_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a whole module: each parameter under its first name, and every persistent buffer."""
    yield from module.named_parameters()
    buffers = {name for name, _ in module.named_buffers()}
    yield from ((name, tensor) for name, tensor in module.state_dict().items() if name in buffers)


def _split_stages(spec: ModelSpec, whole: nn.Module, layout: Layout, groups: MeshGroups) -> RankStages:
    if layout.pipeline == 1:
        return RankStages({0: whole}, ())
    if spec.pipeline_spec is None:
        what = f"the model '{spec.name}' is not a chain of units, so it cannot be cut into {layout.num_stages} stages"
        raise ModelError(what, "Name its modules in order in model.stages, or use pipeline=1.")
    if len(spec.pipeline_spec.units) < layout.num_stages:
        what = f"the model's {len(spec.pipeline_spec.units)} units do not fill {layout.num_stages} stages"
        raise ModelError(what, "Use a smaller pipeline, or name more modules in model.stages.")
    ranges = stage_ranges(spec.pipeline_spec.costs, layout)
    placement = stage_placement(layout.schedule, layout.pipeline)
    rank_stages = split_into_stages(whole, spec.pipeline_spec, ranges, placement[groups.pipeline.rank])
    if layout.zero == 3:
        _refuse_shared(whole, spec.pipeline_spec.units, ranges, placement)
    return rank_stages


def _refuse_shared(
    whole: nn.Module, units: Sequence[str], ranges: Sequence[range], placement: Iterable[Sequence[int]]
) -> None:
    """Refuse a module in two stages of one rank: FSDP2 shards a module under one root only, and each stage is a root.

    Checks the stages of all ranks, so that all ranks raise the same error.
    """
    for own in placement:
        found: dict[nn.Module, tuple[str, int]] = {}
        held = [(stage, units[number]) for stage in own for number in ranges[stage]]
        for stage, unit in held:
            for module in whole.get_submodule(unit).modules():
                first, before = found.setdefault(module, (unit, stage))
                if before != stage and next(module.parameters(), None) is not None:
                    what = f"stages {before} and {stage} of one rank both hold the module of '{unit}'"
                    what += "" if first == unit else f" (it is that of '{first}' too)"
                    raise ModelError(
                        f"{what}, which zero=3 cannot shard twice",
                        "Use zero=2, or a schedule with one stage per rank (1f1b).",
                    )


def _transform(
    spec: ModelSpec, module: nn.Module, settings: ParallelSettings, groups: MeshGroups, wrapped: set[nn.Module]
) -> None:
    """``wrapped``: modules that an earlier stage of this rank shares and has already wrapped."""
    blocks = tuple(_unwrapped(module, spec.blocks, wrapped))
    units = tuple(_unwrapped(module, spec.compile_units, wrapped))
    wrapped.update(module.modules())
    if settings.batch_norm == "sync" and groups.replica_group.data.size > 1:
        convert_sync_batch_norm(module, groups.replica_group.data.process_group)
    is_around = settings.compiled and settings.recompute == "full"
    if not is_around:
        recompute(module, blocks, settings.recompute, settings.recompute_keep)
    if settings.compiled:
        for name in units:
            module.get_submodule(name).compile()
    if is_around:
        recompute_compiled(module, [name for name in blocks if name in units])
    if settings.layout.zero == 3:
        shard_fully(
            module,
            blocks,
            groups.sharding_mesh(with_replicas=settings.sums_replicas),
            precision=settings.precision,
            hold=settings.hold,
            prefetch=settings.prefetch,
            overlap=settings.overlap,
        )


def _idle_recompute(spec: ModelSpec, settings: ParallelSettings) -> str:
    if settings.recompute == "none" or spec.blocks:
        return ""
    what = f'train.recompute = "{settings.recompute}" does nothing: {spec.name} has no list or sequence of blocks'
    return f"{what}. Put its repeated parts into an nn.ModuleList or nn.Sequential."


def _unwrapped(module: nn.Module, names: Iterable[str], wrapped: Collection[nn.Module]) -> Iterator[str]:
    """The named modules that are in this stage and in no earlier one; each once, by its first name."""
    here = {name for name, part in module.named_modules() if part not in wrapped}
    return (name for name in names if name in here)


def _tie_groups(ties: Iterable[TiedParameter], layout: Layout, groups: MeshGroups) -> dict[str, dist.ProcessGroup]:
    """For each tied parameter of this rank, the group of ranks that hold a copy; none where all copies are here."""
    where = {stage: rank for rank, own in enumerate(stage_placement(layout.schedule, layout.pipeline)) for stage in own}
    found: dict[str, dist.ProcessGroup] = {}
    for tie in ties:  # in the same order on every rank: creating a group is a collective
        coordinates = sorted({where[stage] for stage in tie.stages})
        group = groups.across_stages(coordinates) if len(coordinates) > 1 else None
        if group is not None:
            found[tie.name] = group
    return found


def _held(
    rank_stages: RankStages,
    names: _Names,
    shards: Mapping[str, TensorShard],
    ties: Mapping[str, dist.ProcessGroup],
    groups: MeshGroups,
) -> Iterator[LocalParameter]:
    """Each parameter object of this rank once, under its first name in the whole model."""
    owners: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for number, module in enumerate(rank_stages.stages.values()):
        for name, parameter in module.named_parameters():
            owners.setdefault(parameter, []).append((number, names.first[name]))
    own_stages = list(rank_stages.stages)
    primary_stage = {tie.name: tie.stages[0] for tie in rank_stages.ties}
    for parameter, [(number, first), *more] in owners.items():
        shard = shards.get(first)
        is_partial = shard is not None and shard.is_partial
        over = (groups.tensor.process_group if is_partial else None, ties.get(first))
        yield LocalParameter(
            parameter,
            piece=shard.piece if shard is not None else Piece.whole(first, names.shapes[first]),
            aliases=names.aliases(first),
            is_primary=(shard is None or shard.is_primary)
            and primary_stage.get(first, own_stages[number]) == own_stages[number],
            stage=number if not more else SEVERAL_STAGES,
            partial_over=tuple(group for group in over if group is not None),
        )


def _fill(
    built: BuiltModule, stages: nn.ModuleList, held: Iterable[LocalParameter], groups: MeshGroups, device: torch.device
) -> None:
    init_targets((InitTarget(*local_part(one, groups.shard)) for one in held), built.source, device)
    for stage in stages:
        built.source.fill_buffers(stage)


def is_sharded(held: LocalParameter) -> bool:
    """Whether FSDP2 has sharded the parameter over the shard group."""
    return isinstance(held.parameter, DTensor)


def local_part(held: LocalParameter, shard: RankGroup) -> tuple[Tensor, Piece]:
    """The part of a parameter in this rank's memory: the held tensor, or this rank's rows of it under FSDP2."""
    if not isinstance(held.parameter, DTensor):
        return held.parameter.detach(), held.piece
    return held.parameter.to_local().detach(), held.piece.shard(0, shard.rank, shard.size)

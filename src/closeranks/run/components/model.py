"""This rank's part of the model, as a component: its parameters and buffers are state.

Invariant: each value is listed by every rank that holds it, with the number of ranks that do, so that a save can divide
the writing among them; nothing is ever gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.weights.protocol import Weights
from closeranks.core.pieces import Piece
from closeranks.core.protocols import ModelSpec, ParameterShard
from closeranks.data.sampling.order import MicroBatch
from closeranks.elastic.vote import Verdict
from closeranks.facts.pipeline.stages import stage_placement
from closeranks.parallel.apply import DistributedModel, is_sharded, local_part, whole_tensors
from closeranks.parallel.batch_norm import BatchStatistics
from closeranks.parallel.pipeline.executor import Pipeline
from closeranks.parallel.pipeline.stages import stage_ranges
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.run.state.saved_state import MODEL, SavedState, check_same_shapes


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of the model as this rank holds it."""

    piece: Piece
    tensor: Tensor
    is_saved_here: bool
    """False if a rank on another axis than data holds the same values and saves them."""
    holders: RankGroup | None
    """The ranks along the data axis that hold the same values; None: only this rank counts."""
    is_steady: bool
    """Whether nothing but the optimizer changes it."""
    is_sharded: bool = False
    """Whether it is sharded over the data ranks."""

    @property
    def is_primary(self) -> bool:
        """Whether this rank holds the primary copy: each value has exactly one."""
        return self.is_saved_here and (self.holders is None or self.holders.rank == 0)


class RunningStatistics(Component):
    """Batch norm's running statistics: one update per step, with the mean over all micro-batches."""

    def __init__(self, statistics: Sequence[BatchStatistics]) -> None:
        """``statistics``: one for each of this rank's stages."""
        self._statistics = statistics

    def begin(self, index: int) -> None:
        for statistics in self._statistics:
            statistics.begin()

    def before_forward(self, micro_batch: MicroBatch, stage: int) -> None:
        self._statistics[stage].next(counts=not micro_batch.is_padding)

    def update(self, index: int, verdict: Verdict) -> None:
        for statistics in self._statistics:
            statistics.finish(verdict.taken)


class Model(Component):
    """``saves_trained``: False where another component lists and restores the trained parameters."""

    def __init__(
        self,
        spec: ModelSpec,
        applied: DistributedModel,
        precision: Precision,
        context: RunContext,
        *,
        saves_trained: bool = True,
    ) -> None:
        self.spec, self.applied, self.precision, self.device = spec, applied, precision, context.device
        self.layout, self._groups, self._saves_trained = context.layout, context.groups, saves_trained
        self._primary = frozenset(held.piece.name for held in applied.held if held.is_primary)
        self._sharded = frozenset(held.piece.name for held in applied.held if is_sharded(held))
        self.module: nn.Module = applied.module
        self.pipeline: Pipeline | None = applied.pipeline
        self.statistics = applied.statistics
        self.loss_divisor = loss_divisor(spec, context.schedule.micro_batch) if precision.scales_loss else 1.0
        """Losses are sums: divided by a micro-batch's size, they stay within fp16's range under the scale."""

    def local_tensors(self) -> Iterator[ModelTensor]:
        """Every parameter and persistent buffer of this rank; a tied parameter under its first name."""
        groups = self._groups
        for held in self.applied.held:
            tensor, piece = local_part(held, groups.shard)
            is_shard = is_sharded(held)
            holders = groups.replica if is_shard else groups.data
            yield ModelTensor(piece, tensor, held.is_primary, holders, is_steady=True, is_sharded=is_shard)
        is_primary_here = groups.data.rank == 0 and groups.tensor.rank == 0
        names: set[str] = set()
        for name, tensor in _buffers(self.applied.stages.values()):
            is_primary = is_primary_here and name not in names and self._primary_rank(name) == groups.pipeline.rank
            names.add(name)
            # Any forward may change a buffer.
            yield ModelTensor(Piece.whole(name, tuple(tensor.shape)), tensor, is_primary, None, is_steady=False)

    def tensors(self) -> Iterator[StateTensor]:
        for one in self._saved():
            yield make_state_tensor(
                MODEL, one.piece, one.tensor, one.holders, is_saved_here=one.is_saved_here, is_steady=one.is_steady
            )

    def shard_state(
        self, section: str, shard: ParameterShard, key: str, tensor: Tensor, *, per_replica: bool = False
    ) -> StateTensor:
        """A state tensor that belongs to a parameter shard, under its own key: of the shard's shape, or a scalar."""
        name, groups = shard.piece.name, self._groups.replica_group if per_replica else self._groups
        piece, is_saved_here = replace(shard.piece, name=key), name in self._primary
        if tensor.ndim == 0:  # a scalar such as a step counter: the rank that holds the first element saves it
            piece, is_saved_here = Piece.whole(key, ()), is_saved_here and _holds_first(shard.piece)
        # With zero 1 and 2 every shard is a part of its parameter: a range of rows, or a tensor box if memory is in
        # another order.
        is_shard = self.layout.zero in (1, 2) or name in self._sharded
        holders = groups.replica if is_shard else groups.data
        return replace(
            make_state_tensor(section, piece, tensor, holders, is_saved_here=is_saved_here), per_replica=per_replica
        )

    def version(self) -> object:
        # FSDP2 never moves the parameters that it has sharded.
        addresses = [held.parameter.data_ptr() for held in self.applied.held if not is_sharded(held)]
        return addresses, [id(tensor) for stage in self.applied.stages.values() for tensor in stage.buffers()]

    def check(self, saved: SavedState) -> None:
        check_same_shapes(self.applied.shapes, saved.shapes(MODEL))

    def restore(self, saved: SavedState) -> None:
        for one in self._saved():
            saved.read_into(MODEL, one.piece.name, one.piece, one.tensor)

    def _saved(self) -> Iterator[ModelTensor]:
        left_out = frozenset[str]() if self._saves_trained else self.applied.trainable
        return (one for one in self.local_tensors() if one.piece.name not in left_out)

    def unsaved_warnings(self) -> list[str]:
        """Warnings about state of modules that is neither parameter nor buffer, and so is in no checkpoint."""
        found = [(n, m) for stage in self.applied.stages.values() for n, m in stage.named_modules()]
        names = [name for name, module in found if type(module).get_extra_state is not nn.Module.get_extra_state]
        return [
            f"the result of get_extra_state of '{name}' is not saved, and a resumed run starts without it"
            for name in names
        ]

    def _primary_rank(self, name: str) -> int:
        pipeline_spec, layout = self.spec.pipeline_spec, self.layout
        if pipeline_spec is None or layout.pipeline == 1:
            return 0
        ranges = stage_ranges(pipeline_spec.costs, layout)
        return primary_buffer_rank(name, pipeline_spec.units, ranges, stage_placement(layout.schedule, layout.pipeline))


def make_state_tensor(
    section: str,
    piece: Piece,
    tensor: Tensor,
    holders: RankGroup | None,
    *,
    is_saved_here: bool,
    is_steady: bool = True,
) -> StateTensor:
    rank, size = (holders.rank, holders.size) if holders else (0, 1)
    return StateTensor(section, piece.name, piece, tensor, is_steady, rank, size, is_saved_here)


def _holds_first(piece: Piece) -> bool:
    return piece.numel > 0 and not any(piece.start) and (piece.flat is None or piece.flat[0] == 0)


def loss_divisor(spec: ModelSpec, micro_batch: int) -> float:
    """The number of a micro-batch's items, rounded up to a power of two: dividing by that is exact."""
    return float(1 << (micro_batch * spec.items_per_sample - 1).bit_length())


def load_model(module: nn.Module, weights: Weights) -> None:
    """Copy weights and buffers into a whole module of the same shape, one tensor at a time."""
    own = dict(whole_tensors(module))
    check_same_shapes({name: tuple(tensor.shape) for name, tensor in own.items()}, weights.names())
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights.read(name, Piece.whole(name, tuple(tensor.shape)), tensor.dtype))


def _buffers(stages: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Each persistent buffer object once. Two stages may share a buffer, or each have one of the same name."""
    seen: set[int] = set()
    for stage in stages:
        persistent = stage.state_dict().keys()
        for name, tensor in stage.named_buffers():
            if name in persistent and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def primary_buffer_rank(
    name: str, units: Sequence[str], ranges: Sequence[range], placed: Sequence[Sequence[int]]
) -> int:
    """The pipeline rank that saves a buffer: that of its unit's first stage; 0 for a buffer outside all units, which
    every rank has.

    ``ranges``: the units of each stage; ``placed``: the stages of each rank.
    """
    number = next((number for number, unit in enumerate(units) if name.startswith(f"{unit}.")), None)
    if number is None:
        return 0
    stage = next(stage for stage, own in enumerate(ranges) if number in own)
    return next(rank for rank, stages in enumerate(placed) if stage in stages)

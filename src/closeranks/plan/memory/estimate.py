"""Does it fit? The memory of the fullest rank of a choice, part by part, and the verdict.

Invariants: the parts add up to the total; "fits" leaves the stated margin free, "does not fit" misses by more than it,
and everything between is "borderline".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from closeranks.facts.cluster import Cluster
from closeranks.facts.layout import Layout
from closeranks.facts.memory.peak import ActivationBytes, peak_bytes
from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.facts.pipeline.occupancy import BackwardSplitting
from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.plan.memory.conventions import LEAN_12, MIXED_16, OWN, StateConvention, convention_of
from closeranks.plan.memory.in_flight import SPLIT_SCHEDULES, heads_held, stages_held
from closeranks.plan.memory.model_sizes import RankParams, sizes_of
from closeranks.plan.memory.saved_activations import SavedActivations, activation_key, saved_activations
from closeranks.plan.memory.states import StateBytes, holds_whole_step, own_reducer, own_weights, state_bytes
from closeranks.plan.step_time.model_figures import model_figures
from closeranks.plan.step_time.stage_loads import RankLoad, rank_loads, stage_blocks
from closeranks.plan.step_time.workload import PlanChoice, Workload, backward_splitting

Verdict = Literal["fits", "borderline", "does not fit"]

MARGIN = 0.10
"""Of the estimate: how far from the device's memory a verdict stays."""
_MIB = 1 << 20
_CONTEXT_BYTES = 600 * _MIB
"""What the driver, the kernels' code and the libraries' handles take before the first tensor."""
_WORKSPACE_BYTES = 96 * _MIB
_COMMUNICATOR_BYTES = 160 * _MIB
"""Channels of one NCCL communicator; one for each axis in use."""
_RESERVE = 0.03
"""Of what is allocated and freed within a step: what the caching allocator cannot reuse."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The fullest rank, in bytes."""

    parts: tuple[NamedBytes, ...]
    capacity_bytes: int
    convention: str
    pipeline_rank: int = 0
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", sum([part.num_bytes for part in self.parts]))

    @property
    def allocated_bytes(self) -> int:
        """The peak of what tensors hold, as ``torch.cuda.max_memory_allocated`` counts."""
        return sum(part.num_bytes for part in self.parts if part.name not in _OUTSIDE)

    @property
    def margin_bytes(self) -> int:
        return round(MARGIN * self.total_bytes)

    @property
    def verdict(self) -> Verdict:
        margin = self.margin_bytes
        if self.total_bytes + margin <= self.capacity_bytes:
            return "fits"
        return "borderline" if self.total_bytes - margin <= self.capacity_bytes else "does not fit"

    @property
    def missing_bytes(self) -> int:
        """By how much it is too large, without any margin; 0 where it is not."""
        return max(0, self.total_bytes - self.capacity_bytes)

    def part(self, name: str) -> int:
        return next((part.num_bytes for part in self.parts if part.name == name), 0)


_OUTSIDE = frozenset({"allocator reserve", "device context and libraries"})


def memory_estimate(
    workload: Workload, choice: PlanChoice, cluster: Cluster, convention: StateConvention | None = None
) -> MemoryEstimate:
    return MemoryEstimator(workload, cluster).estimate(choice, convention)


def side_by_side(workload: Workload, choice: PlanChoice, cluster: Cluster) -> tuple[MemoryEstimate, MemoryEstimate]:
    """The same choice with 16 bytes of state per parameter, and with 12."""
    estimator = MemoryEstimator(workload, cluster)
    return estimator.estimate(choice, MIXED_16), estimator.estimate(choice, LEAN_12)


class MemoryEstimator:
    """Estimates many choices for one workload; what they share is computed once."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._sizes = sizes_of(workload.shape)
        self._loads: dict[Hashable, tuple[tuple[int, RankLoad], ...]] = {}
        self._blocks: dict[Hashable, Sequence[Sequence[int]]] = {}
        self._states: dict[Hashable, tuple[RankParams, StateBytes]] = {}
        self._saved: dict[Hashable, SavedActivations] = {}
        self._may_fit: dict[Hashable, bool] = {}

    def estimate(self, choice: PlanChoice, convention: StateConvention | None = None) -> MemoryEstimate:
        found = convention or convention_of(choice.software)
        ranks = [self._rank_parts(choice, found, rank, load) for rank, load in self._ranks(choice)]
        fullest = max(ranks, key=lambda one: sum([part.num_bytes for part in one[1]]))
        return MemoryEstimate(
            tuple([part for part in fullest[1] if part.num_bytes]),
            self._cluster.device.memory_bytes,
            found.name,
            fullest[0],
        )

    def may_fit(self, choice: PlanChoice) -> bool:
        """False only if weights and optimizer alone are too big, which is known of a layout before anything else."""
        convention = convention_of(choice.software)
        key = (choice.layout, convention.name, choice.optimizer, choice.offload, choice.stages_per_rank)
        if key not in self._may_fit:
            states = (self._state_of(choice, convention, load)[1] for _, load in self._ranks(choice))
            least = max(state.weights + state.optimizer for state in states)
            self._may_fit[key] = (1 + MARGIN) * least <= self._cluster.device.memory_bytes
        return self._may_fit[key]

    def _rank_parts(
        self, choice: PlanChoice, convention: StateConvention, rank: int, load: RankLoad
    ) -> tuple[int, list[NamedBytes]]:
        layout, num_micro = choice.layout, choice.num_micro(self._workload.global_batch)
        params, state = self._state_of(choice, convention, load)
        held = self._held(choice, rank, load, num_micro)
        activations, count = self._activations(choice, convention, load, params, held), held.count
        if convention is OWN:
            reducer = own_reducer(params, layout, is_half=choice.precision == "bf16")
            peak = peak_bytes(own_weights(params), reducer, activations, num_micro, count)
            gradients, moving = peak.gradients, [*peak.buffers, *peak.activations]
        else:
            parts_held = _all_at_once(activations)
            # In a step of one micro-batch gradients appear as activations are freed: never both in full.
            is_late = num_micro == 1 and not convention.has_early_gradients
            late = min(state.gradients, sum(part.num_bytes for part in parts_held)) if is_late else 0.0
            gradients, moving = state.gradients - late, [*state.buffers, *parts_held]
        parts = [
            NamedBytes("weights", round(state.weights)),
            NamedBytes("gradients", round(gradients)),
            NamedBytes("optimizer", round(state.optimizer)),
            *moving,
        ]
        return rank, [*parts, *self._outside(layout, sum(part.num_bytes for part in moving))]

    def _splitting(self, choice: PlanChoice) -> BackwardSplitting:
        return backward_splitting(choice, is_traced=isinstance(self._workload.shape, ModuleTrace))

    def _held(self, choice: PlanChoice, rank: int, load: RankLoad, num_micro: int) -> _Held:
        """Stages are counted one by one: those that hold most micro-batches may have most blocks."""
        layout, splitting = choice.layout, self._splitting(choice)
        stages = stages_held(layout, rank, num_micro, choice.stages_per_rank, splitting)
        blocks = self._stage_blocks(choice)[rank] if layout.pipeline > 1 else (load.num_blocks,)
        count = sum(stage.held * each for stage, each in zip(stages, blocks, strict=True))
        return _Held(
            count=count / load.num_blocks if load.num_blocks else fmean(stage.held for stage in stages),
            heads=load.num_heads * heads_held(layout, num_micro, stages[-1], splitting),
            deferred=tuple(
                (stage.deferred, each)
                for place, (stage, each) in enumerate(zip(stages, blocks, strict=True))
                if place or not load.num_embeddings
            ),
            deferred_ends=load.num_embeddings * stages[0].deferred + load.num_heads * stages[-1].deferred,
            is_late=splitting == "late" and any(stage.deferred for stage in stages),
            waits=all(stage.deferred == stage.held for stage in stages),
        )

    def _activations(
        self, choice: PlanChoice, convention: StateConvention, load: RankLoad, params: RankParams, held: _Held
    ) -> ActivationBytes:
        layout, saved, count, heads = choice.layout, self._saved_of(choice), held.count, held.heads
        borders = 2 * choice.stages_per_rank - load.num_embeddings - load.num_heads if layout.pipeline > 1 else 0
        casts = 0.0
        # ZeRO-3 frees weights between forward and backward, and casts them again.
        frees = layout.zero == 3 and not holds_whole_step(layout)
        if convention is OWN and choice.precision != "fp32" and not frees:
            in_blocks = params.matrices + params.experts if choice.recompute == "none" else 0.0
            casts = 2 * (count * in_blocks + heads * params.head)
        has_head, has_blocks = load.num_heads > 0 and not held.waits, load.num_blocks > 0
        kept = sum(many * max(0.0, blocks * saved.deferred - saved.late_freed) for many, blocks in held.deferred)
        return ActivationBytes(
            blocks=count * load.num_blocks * saved.block,
            ends=count * load.num_embeddings * saved.embedding + heads * saved.head,
            casts=casts,
            borders=count / choice.stages_per_rank * borders * saved.hidden,
            head=has_head * saved.head,
            logits=has_head * saved.logits,
            logits_gradient=has_head * saved.logits_gradient,
            again=has_blocks * saved.working,
            block_gradients=has_blocks * saved.block_gradients,
            deferred=kept + held.deferred_ends * saved.deferred_end,
            is_late=held.is_late,
        )

    def _outside(self, layout: Layout, moving: float) -> Sequence[NamedBytes]:
        if self._cluster.device.kind == "cpu":
            return ()
        axes = sum(size > 1 for size in (layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert))
        libraries = _CONTEXT_BYTES + _WORKSPACE_BYTES + axes * _COMMUNICATOR_BYTES
        return (
            NamedBytes("allocator reserve", round(_RESERVE * moving)),
            NamedBytes("device context and libraries", libraries),
        )

    def _state_of(
        self, choice: PlanChoice, convention: StateConvention, load: RankLoad
    ) -> tuple[RankParams, StateBytes]:
        layout = choice.layout
        key = (layout, load, convention.name, choice.optimizer, choice.offload)
        if key not in self._states:
            params = self._sizes.of_rank(load, layout.tensor, layout.expert)
            state = state_bytes(params, layout, convention, optimizer=choice.optimizer, offload=choice.offload)
            self._states[key] = params, state
        return self._states[key]

    def _saved_of(self, choice: PlanChoice) -> SavedActivations:
        key = activation_key(choice)
        if key not in self._saved:
            self._saved[key] = saved_activations(self._workload, choice)
        return self._saved[key]

    def _ranks(self, choice: PlanChoice) -> tuple[tuple[int, RankLoad], ...]:
        """Of ranks with the same load the first: it holds the most micro-batches. Where backwards are split the last
        may, and keeps most gradients for the second half."""
        layout = choice.layout
        key = (layout.pipeline, choice.stages_per_rank, layout.schedule, choice.software)
        if key not in self._loads:
            first: dict[RankLoad, int] = {}
            last = {load: rank for rank, load in enumerate(self._all_loads(choice))}
            for rank, load in enumerate(self._all_loads(choice)):
                first.setdefault(load, rank)
            found = {rank: load for load, rank in first.items()}
            if layout.schedule in SPLIT_SCHEDULES:
                found |= {rank: load for load, rank in last.items()}
            self._loads[key] = tuple(found.items())
        return self._loads[key]

    def _all_loads(self, choice: PlanChoice) -> Sequence[RankLoad]:
        layout, is_balanced = choice.layout, choice.software == "closeranks"
        figures = model_figures(self._workload)
        return rank_loads(figures, layout.pipeline, choice.stages_per_rank, layout.schedule, is_balanced=is_balanced)

    def _stage_blocks(self, choice: PlanChoice) -> Sequence[Sequence[int]]:
        layout = choice.layout
        key = (layout.pipeline, choice.stages_per_rank, choice.software)
        if key not in self._blocks:
            figures, is_balanced = model_figures(self._workload), choice.software == "closeranks"
            self._blocks[key] = stage_blocks(
                figures, layout.pipeline, choice.stages_per_rank, layout.schedule, is_balanced=is_balanced
            )
        return self._blocks[key]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds when its memory is fullest, in micro-batches."""

    count: float
    """Of all its blocks."""
    heads: float
    """Of head and loss."""
    deferred: tuple[tuple[float, int], ...]
    """By stage: micro-batches whose weight gradients are still to come, and the stage's blocks."""
    deferred_ends: float
    """Of the first stage, which keeps its output's gradient alone, and of the head."""
    is_late: bool
    waits: bool
    """Whether only second halves of backwards are left: the last loss was before."""


def _all_at_once(activations: ActivationBytes) -> list[NamedBytes]:
    """Blocks are computed again after the logits are freed: only the larger of the two counts."""
    logits, again = activations.logits, activations.again
    return [
        NamedBytes("activations of blocks", round(activations.blocks)),
        NamedBytes("activations of embedding, head and loss", round(activations.ends)),
        NamedBytes("logits and their gradient", round(logits) if logits >= again else 0),
        NamedBytes("one block computed again", round(again) if again > logits else 0),
        NamedBytes("hidden states at the ends of stages", round(activations.borders)),
    ]

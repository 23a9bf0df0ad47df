"""Finds the legal layouts of a job on a number of ranks, and computes the cost of each.

Every way to divide the ranks among the axes is checked, and for every legal one the bytes that its fullest rank holds
and its busiest rank sends are computed. Pure arithmetic without torch. Invariant: nothing is left out silently: layouts
that are not legal are counted with their reason, and ``candidate_layouts`` says what it does not enumerate.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from closeranks.core.errors import Problem
from closeranks.facts.communication.comm_volume import ActivationTraffic, CollectiveVolume, comm_volumes
from closeranks.facts.layout import Layout, LayoutConstraints, divisors, legal_problems
from closeranks.facts.memory.activations import ActivationSettings, activation_bytes
from closeranks.facts.memory.activations import LlamaStage as LlamaStage
from closeranks.facts.memory.memory_per_rank import (
    CostSettings,
    RankMemory,
    RankParameters,
    StageUnits,
    rank_memory,
    rank_parameters,
    reducer_bytes,
    resolve_hold,
    stages_per_rank,
    tied_across_ranks,
    weight_bytes,
)
from closeranks.facts.memory.peak import ActivationBytes, PeakBytes, ReducerBytes, WeightBytes, peak_bytes
from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.facts.mesh import Mesh
from closeranks.facts.pipeline.occupancy import PipelineOccupancy, StagesHeld, layout_occupancy
from closeranks.facts.shapes.llama import LlamaShape
from closeranks.facts.shapes.model_structure import ModelStructure, ModelUnit, distinct_parameters
from closeranks.facts.shapes.module_trace import ModuleTrace


@dataclass(frozen=True, slots=True)
class PlanningJob:
    """A job as planning sees it: everything but the layout."""

    structure: ModelStructure
    constraints: LayoutConstraints
    cost_settings: CostSettings
    llama: LlamaShape | None = None
    """If the model is a Llama: its activations and its traffic on the tensor and pipeline axes are known."""
    activation_settings: ActivationSettings | None = None
    """Of one micro-batch, before any axis splits it."""
    trace: ModuleTrace | None = None
    """Of a user's own module, where it was asked for."""

    def num_micro(self, layout: Layout) -> int:
        """Micro-batches of a step on the data rank that has the most."""
        return -(-self.constraints.num_micro // layout.data)


@dataclass(frozen=True, slots=True)
class RankCost:
    """What a rank at one pipeline coordinate holds and sends: the first one on the shard axis, which has the most."""

    pipeline: int
    stages: tuple[StageUnits, ...]
    state: RankMemory
    peak: PeakBytes
    """The moment of the step at which it holds the most."""
    volumes: tuple[CollectiveVolume, ...]
    num_micro: int

    @property
    def gradient_bytes(self) -> int:
        """At the peak."""
        return round(self.peak.gradients)

    @property
    def buffers(self) -> tuple[NamedBytes, ...]:
        padding = (NamedBytes("padding of buckets", self.state.padding),) if self.state.padding else ()
        return (*padding, *self.peak.buffers)

    @property
    def buffer_bytes(self) -> int:
        return sum(part.num_bytes for part in self.buffers)

    @property
    def activations(self) -> tuple[NamedBytes, ...]:
        return self.peak.activations

    @property
    def activation_bytes(self) -> int:
        return sum(part.num_bytes for part in self.activations)

    @property
    def total_bytes(self) -> int:
        """At the peak."""
        kept = self.state.parameters + self.state.optimizer
        return kept + self.gradient_bytes + self.buffer_bytes + self.activation_bytes

    @property
    def sent_bytes(self) -> int:
        return sum(volume.sent_bytes for volume in self.volumes)

    def sent_on(self, *axes: str) -> int:
        return sum(volume.sent_bytes for volume in self.volumes if volume.axis in axes)


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """The cost of one layout."""

    layout: Layout
    num_micro: int
    occupancy: PipelineOccupancy
    ranks: tuple[RankCost, ...]
    """By pipeline coordinate."""

    @property
    def fullest(self) -> RankCost:
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def busiest(self) -> RankCost:
        return max(self.ranks, key=lambda rank: rank.sent_bytes)


def candidate_layouts(num_ranks: int, *, schedule: str = "1f1b", with_hsdp: bool = False) -> Iterator[Layout]:
    """Every way to divide the ranks among data, tensor and pipeline, with each ZeRO stage that has an effect.

    Left out: context and expert (this version does not train them), ZeRO with a single data rank (nothing to shard
    over), and, unless ``with_hsdp``, ZeRO over fewer than all data ranks.
    """
    for tensor in divisors(num_ranks):
        for pipeline in divisors(num_ranks // tensor):
            data = num_ranks // tensor // pipeline
            plain = Layout(data, tensor=tensor, pipeline=pipeline, schedule=schedule if pipeline > 1 else "1f1b")
            yield plain
            for zero in (1, 2, 3) if data > 1 else ():
                shards = [size for size in divisors(data) if 1 < size < data] if with_hsdp else []
                yield from (replace(plain, zero=zero, shard=shard) for shard in (0, *shards))


@dataclass(frozen=True, slots=True)
class RefusedLayouts:
    """How many layouts one axis rules out, and an example of a reason."""

    axis: str
    count: int
    example: Problem


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    legal: tuple[Layout, ...]
    refused: tuple[RefusedLayouts, ...]

    @property
    def num_refused(self) -> int:
        return sum(refusal.count for refusal in self.refused)


def filter_legal(layouts: Iterable[Layout], constraints: LayoutConstraints) -> LayoutSearch:
    """Separates legal layouts from the others, which are counted by their first problem."""
    legal, refused = [], dict[str, list[Problem]]()
    for layout in layouts:
        problems = legal_problems(layout, constraints)
        if problems:
            refused.setdefault(problems[0].place.removeprefix("layout."), []).append(problems[0])
        else:
            legal.append(layout)
    ranked = sorted(refused.items(), key=lambda entry: -len(entry[1]))
    return LayoutSearch(tuple(legal), tuple(RefusedLayouts(axis, len(found), found[0]) for axis, found in ranked))


def layout_cost(job: PlanningJob, layout: Layout) -> LayoutCost:
    return LayoutCostModel(job).cost(layout)


class LayoutCostModel:
    """Computes the costs of many layouts of one job.

    What layouts have in common is computed once, and so is what ranks have in common: between its ends, a pipeline has
    few kinds of ranks.
    """

    def __init__(self, job: PlanningJob) -> None:
        self._job = job
        self._assignments: dict[tuple[int, str], _StageAssignment] = {}
        self._parameters: dict[Hashable, RankParameters] = {}
        self._llama_stages: dict[Hashable, tuple[LlamaStage, ...]] = {}

    def cost(self, layout: Layout) -> LayoutCost:
        job, assignment = self._job, self._assignment(layout)
        num_micro = job.num_micro(layout)
        settings = replace(job.cost_settings, num_micro=num_micro)
        splitting = job.activation_settings.splitting if job.activation_settings else "split"
        occupancy = layout_occupancy(layout, num_micro, splitting)
        states: dict[Hashable, _KindCost] = {}
        ranks = []
        for coordinate, (stages, kind) in enumerate(zip(assignment.stages, assignment.kinds, strict=True)):
            if kind not in states:
                parameters = self._rank_parameters(stages, kind, assignment.shared, layout)
                states[kind] = _KindCost(
                    rank_memory(parameters, layout, settings),
                    weight_bytes(parameters, layout, settings),
                    reducer_bytes(parameters, layout, settings),
                    comm_volumes(parameters, layout, settings, _activation_traffic(job)),
                )
            found, fullest = states[kind], occupancy.fullest[coordinate]
            activations = self._activations(stages, kind, layout, fullest)
            in_flight = sum(fullest.held[stage.number] for stage in stages) / len(stages)
            peak = peak_bytes(found.weights, found.reducer, activations, num_micro, in_flight)
            ranks.append(RankCost(coordinate, stages, found.state, peak, found.volumes, num_micro))
        return LayoutCost(layout, num_micro, occupancy, tuple(ranks))

    def _assignment(self, layout: Layout) -> _StageAssignment:
        key = (layout.pipeline, layout.schedule)
        if key not in self._assignments:
            stages = stages_per_rank(self._job.structure, layout)
            kinds = tuple(_kind(own, layout) for own in stages)
            self._assignments[key] = _StageAssignment(stages, kinds, tied_across_ranks(stages))
        return self._assignments[key]

    def _rank_parameters(
        self, stages: tuple[StageUnits, ...], kind: Hashable, shared: Collection[str], layout: Layout
    ) -> RankParameters:
        num_shards = Mesh(layout).sizes[2] if layout.zero else 0
        key = (kind, layout.tensor, layout.zero == 3, layout.data == 1, num_shards)
        if key not in self._parameters:
            self._parameters[key] = rank_parameters(stages, shared, layout, self._job.cost_settings)
        return self._parameters[key]

    def _activations(
        self, stages: Sequence[StageUnits], kind: Hashable, layout: Layout, fullest: StagesHeld
    ) -> ActivationBytes:
        llama, settings = self._job.llama, self._job.activation_settings
        if llama is None or settings is None:
            return ActivationBytes()
        key = (kind, layout.tensor)
        if key not in self._llama_stages:
            self._llama_stages[key] = tuple(_llama_stage(stage, layout) for stage in stages)
        frees = layout.zero == 3 and resolve_hold(self._job.cost_settings.hold, layout) == "shards"
        settings = replace(settings, tensor=layout.tensor, keeps_casts=not frees)
        counts = ((fullest.held[stage.number], fullest.deferred[stage.number]) for stage in stages)
        llama_stages = [
            replace(stage, in_flight=held, deferred=deferred)
            for stage, (held, deferred) in zip(self._llama_stages[key], counts, strict=True)
        ]
        return activation_bytes(llama, settings, llama_stages, is_pipeline=layout.pipeline > 1)


@dataclass(frozen=True, slots=True)
class _KindCost:
    """What equal ranks hold and send, whatever micro-batches they have in flight."""

    state: RankMemory
    weights: WeightBytes
    reducer: ReducerBytes
    volumes: tuple[CollectiveVolume, ...]


@dataclass(frozen=True, slots=True)
class _StageAssignment:
    """A pipeline's stages by rank, a key that equal ranks share, and the weights that several ranks hold."""

    stages: tuple[tuple[StageUnits, ...], ...]
    kinds: tuple[Hashable, ...]
    shared: frozenset[str]


def _kind(stages: Sequence[StageUnits], layout: Layout) -> Hashable:
    """Equal for ranks that hold and send the same. The two ends of the pipeline have a neighbour on one side only, and
    where a V turns a rank is its own neighbour."""
    ends = (0, layout.num_stages - 1)
    turns = any(later.number == stage.number + 1 for stage, later in pairwise(stages))
    return turns, tuple((stage.number in ends, tuple(map(_signature, stage.units))) for stage in stages)


def _signature(unit: ModelUnit) -> Hashable:
    return unit.is_block, tuple((weight.shape, weight.dim) for weight in unit.weights)


def _activation_traffic(job: PlanningJob) -> ActivationTraffic | None:
    if job.llama is None or job.activation_settings is None:
        return None
    settings = job.activation_settings
    return ActivationTraffic(
        settings.num_tokens, job.llama.dim, settings.precision, settings.recompute, tuple(settings.keep)
    )


def _llama_stage(stage: StageUnits, layout: Layout) -> LlamaStage:
    blocks = [unit for unit in stage.units if unit.is_block]
    products = (weight for weight in distinct_parameters(blocks) if len(weight.shape) > 1)
    head = next((unit for unit in stage.units if unit.name == "lm_head"), None)
    return LlamaStage(
        num_blocks=len(blocks),
        is_first=stage.number == 0,
        is_last=stage.number == layout.num_stages - 1,
        in_flight=1,
        num_block_params=sum(weight.numel(layout.tensor) for weight in products),
        num_head_params=head.numel(layout.tensor) if head else 0,
    )

"""Builds one rank of a job at its real world size and runs one step of it, on tensors without data.

Model, layout, reducer, optimizer and pipeline are the run's own code; only tensors and process groups are fake. Nothing
is allocated and nobody else takes part. Invariant: what the rank holds and sends depends on shapes alone, so it is what
a real rank holds and sends on a CPU; values are never read.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from closeranks.core.protocols import Batch, ModelSpec, PipelineSpec, Reducer
from closeranks.facts.layout import Layout
from closeranks.models.llama.linear import Linear
from closeranks.optim.optimizer import Optimizer
from closeranks.parallel.apply import DistributedModel, parallelize
from closeranks.parallel.initialization.materialize import cast_floating, to_empty
from closeranks.parallel.mesh_groups import MeshGroups, open_mesh_groups
from closeranks.parallel.pipeline.p2p import HiddenStateMeta, P2PChannel
from closeranks.parallel.pipeline.stages import stage_ranges
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor.tensor_parallel import shard_module
from closeranks.run.builder.build import make_optimizer
from closeranks.run.builder.parallelize import ParameterGrouping, make_reducer, parallel_settings
from closeranks.run.dry_run.live_bytes import FAKE, LiveBytes
from closeranks.run.dry_run.sent_collectives import SentCollectives, axes_of_groups
from closeranks.run.job.job import Job
from closeranks.sync.reducers.fully_sharded import local_of

_CPU = torch.device("cpu")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank held and sent."""

    parameter_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Of all tensors that lived at once in the step."""
    sent: SentCollectives


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[RankGroup]:
    """A process group of which the other ranks are not there: collectives return at once."""
    hook = sys.excepthook  # torch installs one that prefixes every line with the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield RankGroup(rank, num_ranks)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def run_rank_step(
    job: Job,
    layout: Layout,
    spec: ModelSpec,
    batch: Batch,
    *,
    rank: int,
    num_micro: int,
    report: Callable[[str], object] = lambda line: None,
) -> RankStep:
    """``batch``: a micro-batch. ``report`` is told what is going on."""
    spec.builds_on_meta = True  # a user's factory too: values are not needed
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_cuda_products())
        report(f"forming the groups of {layout.num_ranks:,} ranks")
        groups = open_mesh_groups(stack.enter_context(fake_world(rank, layout.num_ranks)), layout, _CPU, _TIMEOUT_S)
        mode, live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes(FAKE)
        sent = SentCollectives(axes_of_groups(groups, layout))
        metas = _boundary_metas(job, layout, spec, batch, groups, mode) if layout.pipeline > 1 else {}

        def pretend() -> None:
            for entered in (mode, live, sent):
                stack.enter_context(entered)

        report("building the rank's part of the model")
        grouping, settings = ParameterGrouping(job.optim), parallel_settings(job, layout)
        applied = parallelize(spec, settings, groups, _CPU, prepare=grouping.assign_groups, before_memory=pretend)
        if applied.pipeline is not None:
            applied.pipeline.channel = _KnownShapes(applied.pipeline.group, _CPU, metas)
        reducer = make_reducer(job, layout, groups, applied)
        optimizer = make_optimizer(job, layout, groups.replica_group.world, reducer, grouping, num_steps=1)
        live.rest()
        sent.clear()
        report(f"running a step of {num_micro} micro-batch{'' if num_micro == 1 else 'es'}")
        own = _Rank(spec, applied, reducer, optimizer, Precision(job.train.precision), _fake(batch, mode))
        own.run_step(num_micro)
        parameters = sum(local_of(held.parameter).nbytes for held in applied.held)
        state = sum(tensor.nbytes for _, _, tensor in optimizer.state_tensors() if tensor.ndim)
        return RankStep(parameters, state, live.peak, sent)


@contextmanager
def _cuda_products() -> Iterator[None]:
    """Under autocast the CPU keeps a half-precision copy of every weight, and a GPU does not always."""
    Linear.runs_as_on_cuda = True
    try:
        yield
    finally:
        Linear.runs_as_on_cuda = False


def _fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    fake: Batch = tree_map_only(Tensor, mode.from_tensor, dict(batch))
    return fake


@dataclass(slots=True)
class _Rank:
    """One rank's part of a run, as ``run.step`` drives it; a ``PipelineCallbacks``."""

    spec: ModelSpec
    applied: DistributedModel
    reducer: Reducer
    optimizer: Optimizer
    precision: Precision
    batch: Batch
    num_micro: int = 0

    def run_step(self, num_micro: int) -> None:
        self.num_micro = num_micro
        self.applied.module.train()
        statistics = [one for one in self.applied.statistics if one]
        for each in statistics:
            each.begin()
        self.reducer.begin_step(0)
        if self.applied.pipeline is not None:
            self.applied.pipeline.run(self)
        else:
            for number in range(num_micro):
                self._run_micro_batch(is_last=number == num_micro - 1)
        self.reducer.finish()
        one = torch.ones(())
        self.optimizer.step(0, self.reducer.gradients(), one, one)
        self.reducer.gather_parameters()
        for each in statistics:
            each.finish(one)
        self.reducer.release()

    def _run_micro_batch(self, *, is_last: bool) -> None:
        self.before_forward(0, 0)
        with self.context():
            total = self.spec.loss(self.applied.module, self._cast()).total
        self.begin_backward(0, is_last=is_last)
        total.backward()
        self.end_backward(0)

    def _cast(self) -> Batch:
        return self.precision.cast(self.batch)

    @property
    def _pipeline_spec(self) -> PipelineSpec:
        assert self.spec.pipeline_spec is not None
        return self.spec.pipeline_spec

    def signature(self, micro: int) -> Hashable:
        return None

    def context(self) -> AbstractContextManager[Any]:
        return self.precision.context(_CPU)

    def before_forward(self, stage: int, micro: int) -> None:
        if self.applied.statistics[stage]:
            self.applied.statistics[stage].next(counts=True)

    def first_input(self, module: nn.Module, micro: int) -> Tensor:
        return self._pipeline_spec.first_input(module, self._cast())

    def shared_inputs(self, module: nn.Module, micro: int) -> Any:
        return self._pipeline_spec.shared_inputs(module, self._cast())

    def loss_from_output(self, module: nn.Module, micro: int, output: Tensor) -> Tensor:
        return self._pipeline_spec.loss_from_output(module, output, self._cast()).total

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        self.reducer.begin_backward(stage, is_last=is_last)

    def end_backward(self, stage: int) -> None:
        self.reducer.end_backward(stage)


@dataclass(slots=True)
class _KnownShapes(P2PChannel):
    """Messages whose shapes are known: nobody is there to send the headers that say them."""

    shapes: Mapping[int, HiddenStateMeta] = field(default_factory=dict)
    """By the stage that sends."""

    def send_meta(self, boundary: int, signature: Hashable, meta: HiddenStateMeta, peer: int) -> None:
        assert meta == self.shapes[boundary], "the whole model gave another shape than its stage"

    def receive_meta(self, boundary: int, signature: Hashable, peer: int) -> HiddenStateMeta:
        return self.shapes[boundary]


def _boundary_metas(
    job: Job, layout: Layout, spec: ModelSpec, batch: Batch, groups: MeshGroups, mode: FakeTensorMode
) -> dict[int, HiddenStateMeta]:
    """What each stage passes on, from a forward of the whole model, sharded over the tensor axis alone."""
    pipeline_spec, precision = spec.pipeline_spec, Precision(job.train.precision)
    if pipeline_spec is None:
        return {}  # which ``parallelize`` refuses
    with torch.device("meta"):
        module = cast_floating(spec.build(), precision.weights)
    shard_module(module, spec.sharding_rules, spec.activation_collectives, groups.tensor)
    ParameterGrouping(job.optim).assign_groups(module)
    ends = {own[-1]: stage for stage, own in enumerate(stage_ranges(pipeline_spec.costs, layout))}
    found: dict[int, HiddenStateMeta] = {}
    with mode:
        to_empty(module, _CPU)
        cast = precision.cast(_fake(batch, mode))
        with precision.context(_CPU):
            hidden = pipeline_spec.first_input(module, cast)
            shared = pipeline_spec.shared_inputs(module, cast)
            for unit in range(len(pipeline_spec.units)):
                hidden = pipeline_spec.run_unit(module, unit, hidden, shared)
                if unit in ends:
                    found[ends[unit]] = HiddenStateMeta.of(hidden)
    return found

"""Describes a job to the planner: the structure of its model, its constraints and its cost settings.

Our own models are described by their shapes, without torch. A user's module is built on the meta device, which
allocates no weights; if that fails, the error says what is missing. Invariant: nothing is trained, sampled or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from closeranks.core.errors import ModelError
from closeranks.core.registry import is_import_path
from closeranks.facts.layout import LayoutConstraints
from closeranks.facts.memory.activations import ActivationSettings
from closeranks.facts.memory.memory_per_rank import BucketItem, BucketSize, CostSettings
from closeranks.facts.shapes import digits, pairs, recommender
from closeranks.facts.shapes.llama import llama_structure
from closeranks.facts.shapes.model_structure import ModelStructure, distinct_parameters, model_structure
from closeranks.plan.layouts import PlanningJob
from closeranks.run.job.job import Job, layout_constraints, micro_batch_size
from closeranks.sync.config import SyncConfig
from closeranks.sync.reducers.buckets import BucketMember, plan_buckets

if TYPE_CHECKING:
    from torch import nn

    from closeranks.core.protocols import ModelSpec
    from closeranks.facts.shapes.module_trace import ModuleTrace
    from closeranks.models.config import LlamaConfig

ALIGN_BYTES = 64
"""As ``sync.reducers.sharded``, which imports torch, aligns the members of its buckets."""


def describe_job(job: Job, *, traces: bool = False) -> PlanningJob:
    """The job without its layout, as ``plan`` takes it. ``traces``: run a user's own module on tensors without data, in
    seconds, to see what a sample costs; one of the job's samples is read."""
    found = _describe(job, traces)
    return replace(
        found, cost_settings=replace(found.cost_settings, num_trained=len(distinct_parameters(found.structure.units)))
    )


def _describe(job: Job, traces: bool) -> PlanningJob:
    needs = layout_constraints(job, micro_batch_size(job))
    if is_import_path(job.model.name):
        spec, module = _built_on_meta(job)
        if spec.pipeline_spec is not None:  # the table may use patterns: the number of layers is known only now
            needs = replace(needs, num_layers=len(spec.pipeline_spec.units))
        structure = _structure_of(spec, module)
        settings = _cost_settings(job, len(spec.metrics), _num_statistics(module))
        return PlanningJob(structure, needs, settings, trace=_trace(job, spec, module, structure) if traces else None)
    if job.model.name == "llama":
        return _llama(job, cast("LlamaConfig", job.model), needs)
    small = _SMALL[job.model.name]
    is_kept = "tables." if job.optim.tables.is_on else "\0"  # rows that servers keep are no parameters
    shapes = {name: shape for name, shape in small.shapes(job.model).items() if not name.startswith(is_kept)}
    found = model_structure(shapes, units=[unit for unit in small.units(job.model) if not unit.startswith(is_kept)])
    return PlanningJob(found, needs, _cost_settings(job, small.num_metrics, small.num_statistics(job.model)))


@dataclass(frozen=True, slots=True)
class _Small:
    """A model of ours that is described by its parameters alone: functions of its config."""

    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    units: Callable[[Any], tuple[str, ...]]
    num_metrics: int
    num_statistics: Callable[[Any], int] = lambda config: 0


_SMALL = {
    "digits": _Small(
        lambda config: digits.parameter_shapes(config.shape()),
        lambda config: digits.UNITS,
        num_metrics=1,
        num_statistics=lambda config: digits.num_statistics(config.shape()),
    ),
    "pairs": _Small(lambda config: pairs.parameter_shapes(config.shape()), lambda config: pairs.UNITS, num_metrics=2),
    "recommender": _Small(
        lambda config: recommender.parameter_shapes(config.shape()),
        lambda config: recommender.units(config.shape()),
        num_metrics=0,
    ),
}


def _llama(job: Job, config: LlamaConfig, needs: LayoutConstraints) -> PlanningJob:
    shape = config.shape()
    activations = ActivationSettings(
        num_tokens=needs.micro_batch * job.data.seq_len,
        precision=job.train.precision,
        recompute=job.train.recompute,
        keep=job.train.recompute_keep,
        dropout=config.dropout,
        is_compiled=job.train.compile,
    )
    return PlanningJob(llama_structure(shape, job.data.seq_len), needs, _cost_settings(job), shape, activations)


def _cost_settings(job: Job, num_metrics: int = 0, num_statistics: int = 0) -> CostSettings:
    return CostSettings(
        precision=job.train.precision,
        optimizer=job.optim.name,
        has_average=job.optim.ema > 0,
        hold=job.layout.hold,
        prefetch=job.sync.prefetch,
        buckets=ReducerBucketPlanner(job.sync),
        num_metrics=num_metrics,
        num_statistics=num_statistics,
    )


def _built_on_meta(job: Job) -> tuple[ModelSpec, nn.Module]:
    """A user's model. Torch is imported here and nowhere else in planning."""
    import torch

    from closeranks.models.build import spec_for
    from closeranks.run.components.sync.kept_tables import TableBuilder

    spec = spec_for(job.model, seq_len=job.data.seq_len)
    try:
        with torch.device("meta"), TableBuilder(job, spec, torch.device("cpu")).building():
            return spec, spec.build()
    except ModelError as error:
        what = f"{error.what.rstrip('.')}, when built without memory (on the meta device) to count its parameters"
        raise ModelError(what, "Let the factory make its tensors without reading their values.") from error


def _trace(job: Job, spec: ModelSpec, module: nn.Module, structure: ModelStructure) -> ModuleTrace:
    from closeranks.run.job.trace import trace_job

    return trace_job(job, spec, module, [unit.name for unit in structure.units if unit.name])


def _num_statistics(module: nn.Module) -> int:
    """Running means and variances of batch norms."""
    kinds = ("running_mean", "running_var")
    return sum(buffer.numel() for name, buffer in module.named_buffers() if name.rpartition(".")[2] in kinds)


def _structure_of(spec: ModelSpec, module: nn.Module) -> ModelStructure:
    from closeranks.parallel.fully_shard import choose_fsdp_units, describe_modules

    owners: dict[nn.Parameter, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (first := owners.setdefault(parameter, name)) != name:
            ties[name] = first
    pipeline_spec = spec.pipeline_spec
    return model_structure(
        {name: tuple(parameter.shape) for parameter, name in owners.items()},
        units=pipeline_spec.units
        if pipeline_spec is not None
        else spec.blocks or choose_fsdp_units(describe_modules(module), ()),
        costs=pipeline_spec.costs if pipeline_spec is not None else (),
        blocks=spec.blocks,
        rules=[(rule.pattern, rule.dim, rule.sequence) for rule in spec.sharding_rules],
        ties=ties,
    )


class ReducerBucketPlanner:
    """The reducers' own bucket plan, for weights of which only the sizes are known: a
    ``facts.memory.memory_per_rank.BucketPlanner``."""

    def __init__(self, sync: SyncConfig) -> None:
        caps = sync.bucket_caps()
        self._caps = {"cap_bytes": caps.bucket_bytes, "first_cap_bytes": caps.first_bucket_bytes}

    def __call__(self, items: Sequence[BucketItem], *, num_shards: int, element_bytes: int) -> Sequence[BucketSize]:
        axes = list(dict.fromkeys(axis for item in items for axis in item.reduce_axes))
        members = [
            BucketMember(
                item.name,
                item.numel,
                "",
                element_bytes,
                item.stage,
                partial_over=tuple(map(axes.index, item.reduce_axes)),
            )
            for item in items
        ]
        sharding = {"num_shards": num_shards, "align_bytes": ALIGN_BYTES} if num_shards else {}
        plan = plan_buckets(members, **self._caps, **sharding)
        return [BucketSize(bucket.numel, tuple(axes[number] for number in bucket.partial_over)) for bucket in plan]

"""How was a published run trained? Its row as a workload, a choice and a cluster, or the reason why not.

Invariant: nothing here depends on what was measured; what a row does not state is assumed by the rules of this file,
which docs/plan-validate.md lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

from closeranks.core.errors import UserError
from closeranks.facts.cluster import Cluster
from closeranks.facts.layout import Layout
from closeranks.plan.memory.estimate import memory_estimate
from closeranks.plan.step_time.workload import PlanChoice, Precision, Recompute, Workload, choice_problems
from closeranks.plan.validation.run_cluster import cluster_of_run
from closeranks.plan.validation.run_model import shape_of
from closeranks.plan.validation.run_rate import implausible, seconds_of_rate
from closeranks.plan.validation.run_software import SHARDED, software_of
from closeranks.plan.validation.run_table import PublishedRun, UnusableRun
from closeranks.plan.validation.source_split import source_name

Kind = Literal["dense 16-bit", "dense fp8", "experts", "other"]

_CLEARLY_TOO_LARGE = 1.5
_LARGEST = 100_000
"""Samples of a micro-batch, ranks and stages: what is beyond is a slip of the row."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    run: PublishedRun
    workload: Workload
    choice: PlanChoice
    cluster: Cluster
    measured_s: float

    @property
    def source(self) -> str:
        return source_name(self.run.source)

    @property
    def kind(self) -> Kind:
        if self.workload.num_experts:
            return "experts"
        if self.choice.precision == "fp8":
            return "dense fp8"
        return "dense 16-bit" if self.choice.precision in ("bf16", "fp16") else "other"


def plan_runs(runs: Iterable[PublishedRun]) -> tuple[list[RunPlan], list[UnusableRun]]:
    plans: list[RunPlan] = []
    unusable: list[UnusableRun] = []
    for run in runs:
        found = plan_of(run)
        if isinstance(found, RunPlan):
            plans.append(found)
        else:
            unusable.append(UnusableRun(run.number, run.source, found))
    return plans, unusable


def plan_of(run: PublishedRun, *, is_timed: bool = True) -> RunPlan | str:
    """Without its time, ``measured_s`` is 0."""
    if reason := next(_missing(run, is_timed=is_timed), None):
        return reason
    if run.precision == "not modelled":
        return "its precision is not modelled"
    shape, cluster = shape_of(run), cluster_of_run(run)
    if isinstance(shape, str) or isinstance(cluster, str):
        return shape if isinstance(shape, str) else cast("str", cluster)
    layout = _layout(run, cluster)
    if isinstance(layout, str):
        return layout
    if shape.num_experts % layout.expert or layout.expert * layout.pipeline > run.gpu_count:
        return "its expert ranks do not divide its experts or its GPUs"
    try:
        workload = Workload(shape, run.seq_len or 0, run.global_batch or 0)
        choice = _choice(run, layout, workload, cluster)
    except UserError as error:
        return error.what
    if problems := choice_problems(workload, choice, cluster.num_devices):
        return problems[0].what
    if choice.precision not in cluster.device.peak_flops:
        return f"the {cluster.device.name} has no {choice.precision}"
    if not is_timed:
        return RunPlan(run, workload, choice, cluster, 0.0)
    measured_s = run.measured_s or seconds_of_rate(run, workload, choice, cluster)
    if isinstance(measured_s, str):
        return measured_s
    return implausible(measured_s, workload, choice, cluster) or RunPlan(run, workload, choice, cluster, measured_s)


def _missing(run: PublishedRun, *, is_timed: bool) -> Iterator[str]:
    for name in ("seq_len", "global_batch", "micro_batch"):
        if getattr(run, name) is None:
            yield f"{name} is not published"
    if is_timed and not (run.measured_s or run.tflops_per_gpu or run.mfu_pct):
        yield "neither a step time nor a throughput is published"
    if max(run.micro_batch or 0, run.gpu_count // 100, run.interleave_v or 0) > _LARGEST:
        yield "its numbers are too large"
    if (run.global_batch or 0) % (run.micro_batch or 1) and (run.micro_batch or 0) > (run.global_batch or 0):
        yield "the micro-batch is larger than the global batch"


def _layout(run: PublishedRun, cluster: Cluster) -> Layout | str:
    tensor, pipeline, context, expert = run.tp or 1, run.pp or 1, run.cp or 1, run.ep or 1
    if run.tp is None and run.pp is None and run.dp != run.gpu_count:
        return "its layout is not published"
    data, rest = divmod(run.gpu_count, tensor * pipeline * context)
    if rest or data < 1:
        return "its axes do not divide its GPUs"
    if run.dp and run.dp not in (data, data * context):
        return "its axes do not multiply to its GPUs"
    zero = run.zero_stage if run.zero_stage is not None else _unstated_zero(run, cluster)
    if zero not in (0, 1, 2, 3):
        return "there is no such ZeRO stage"
    return Layout(data, zero if data > 1 else 0, 0, tensor, pipeline, context, expert)


def _unstated_zero(run: PublishedRun, cluster: Cluster) -> int:
    """Megatron's optimizer is distributed by default on GPUs younger than the A100."""
    if SHARDED.search(run.note):
        return 3
    has_named = re.search(r"dist-?opt|distributed optimizer|zero-?1", run.note, re.IGNORECASE)
    return 1 if has_named or not _is_a100_or_older(cluster) else 0


def _is_a100_or_older(cluster: Cluster) -> bool:
    return cluster.device.name.startswith(("A100", "V100"))


def _choice(run: PublishedRun, layout: Layout, workload: Workload, cluster: Cluster) -> PlanChoice:
    precision = _precision(run, cluster)
    software = software_of(run, layout, precision, is_a100_or_older=_is_a100_or_older(cluster))
    choice = PlanChoice(
        layout,
        run.micro_batch or 1,
        "none",
        precision,
        compiled=software.compiled,
        virtual_stages=run.interleave_v if run.interleave_v and run.interleave_v > 1 and layout.pipeline > 1 else 0,
        fused_attention=software.fused_attention,
        sequence_parallel=software.sequence_parallel,
        software=software.name,
    )
    return replace(choice, recompute=_recompute(run, choice, workload, cluster))


def _precision(run: PublishedRun, cluster: Cluster) -> Precision:
    if run.precision:
        return cast("Precision", run.precision)
    if re.search(r"\bfp8\b|float8", run.note, re.IGNORECASE):
        return "fp8"
    return "fp16" if cluster.device.name.startswith("V100") else "bf16"


def _recompute(run: PublishedRun, choice: PlanChoice, workload: Workload, cluster: Cluster) -> Recompute:
    """As published; else none, unless that would clearly not fit the device's memory."""
    if run.recompute:
        return cast("Recompute", run.recompute)
    estimate = memory_estimate(workload, choice, cluster)
    return "full" if estimate.total_bytes > _CLEARLY_TOO_LARGE * estimate.capacity_bytes else "none"

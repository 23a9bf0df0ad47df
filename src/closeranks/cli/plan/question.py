"""Turns what was typed (a job file, a cluster, options) into the question that a search answers.

Invariant: everything that cannot be planned is one clear sentence before anything is searched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.core.errors import ConfigError, Problem, UserError
from closeranks.core.registry import did_you_mean, is_import_path
from closeranks.facts.cluster import Cluster, calibrated, find_cluster, with_devices
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.shapes.transformer import num_params as num_params_of
from closeranks.plan.search.costs import CostBasis
from closeranks.plan.search.search import PlanQuestion
from closeranks.plan.search.space import SEARCHED_SCHEDULES, SearchSpace
from closeranks.plan.step_time.workload import PlanChoice, Precision, Workload

if TYPE_CHECKING:
    from closeranks.plan.layouts import PlanningJob
    from closeranks.run.job.job import Job

KEEPABLE = ("layout", "micro-batch", "recompute", "precision", "compile", "schedule", "zero")
_PLAN_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float64": "fp32", "bf16": "bf16", "fp16": "fp16"}
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class JobQuestion:
    """A job, and the question of how to run it on a cluster."""

    job: Job
    question: PlanQuestion
    basis: CostBasis
    own: PlanChoice | None
    """The job's own choice; None if its layout does not take all devices of the cluster."""


def job_question(
    path: Path,
    overrides: Sequence[str],
    cluster_text: str,
    *,
    keep: Collection[str] = (),
    tokens: str = "",
    margin: float = 0.02,
    calibration: Path | None = None,
    failures: str = "",
    num_devices: int = 0,
    model: Path | None = None,
) -> JobQuestion:
    """``num_devices``: how many of the cluster's kind of device; 0: as the cluster says. ``model``: a Hugging Face
    config to plan instead of the job's model."""
    from closeranks.facts.calibration import load_calibration
    from closeranks.facts.failures.failure_rates import load_failures
    from closeranks.run.job.describe import describe_job
    from closeranks.run.job.job import load_job

    for name in keep:
        if name not in KEEPABLE:
            raise ConfigError(
                [Problem("--keep", f"'{name}' is nothing that can be kept", did_you_mean(name, KEEPABLE))]
            )
    job = load_job(path, overrides).value
    if model is None and is_import_path(job.model.name):
        from closeranks.run.job.launch import add_job_folder_to_path

        add_job_folder_to_path(path)
    cluster = find_cluster(cluster_text, num_devices)
    cluster = calibrated(cluster, load_calibration(calibration)) if calibration else cluster
    if model is None:
        planning_job = describe_job(job, traces=True)
        workload = workload_of(planning_job, job)
        constraints, num_params = _known_splits(planning_job.constraints, workload), _num_params(planning_job)
    else:
        workload = config_workload(model, job)
        constraints, num_params = transformer_constraints(workload, job), num_params_of(workload.transformer)
    template = own_choice(job, constraints, cluster)
    question = PlanQuestion(
        workload=workload,
        constraints=constraints,
        cluster=cluster,
        template=template,
        space=search_space(template, constraints, cluster, keep),
        margin=margin,
    )
    budget = token_budget(tokens, job, workload)
    basis = CostBasis(
        num_params, job.train.global_batch, job.data.seq_len or 1, budget,
        load_failures(failures or cluster.failures),
    )  # fmt: skip
    return JobQuestion(job, question, basis, template if template.layout.num_ranks == cluster.num_devices else None)


def on_devices(asked: JobQuestion, num_devices: int) -> JobQuestion:
    """The same question on another number of devices."""
    from closeranks.run.job.job import layout_for

    layout = layout_for(asked.job, num_devices)
    template = replace(asked.question.template, layout=layout)
    question = replace(asked.question, cluster=with_devices(asked.question.cluster, num_devices), template=template)
    return replace(asked, question=question, own=template if layout.num_ranks == num_devices else None)


def require_cluster(text: str, example: str) -> None:
    if not text:
        raise UserError("no cluster was named", f"Name one, such as {example}.")


def require_above_zero(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{option} {value:g} leaves nothing to plan", "Name a number above 0, or leave it out.")


def workload_of(planning_job: PlanningJob, job: Job) -> Workload:
    from closeranks.facts.shapes.transformer import from_llama

    if planning_job.llama is not None:
        shape = from_llama(planning_job.llama)
        return Workload(shape, job.data.seq_len, job.train.global_batch, planning_job.structure)
    trace = planning_job.trace
    if trace is None or not trace.flops_per_sample:
        why = f": {trace.untraced[0]}" if trace is not None and trace.untraced else ""
        raise UserError(
            f"the time of a step of the model '{job.model.name}' cannot be planned, its products are not known{why}",
            "Plan a job with a Llama, or with a module of your own that can run on tensors without data.",
        )
    return Workload(trace, job.data.seq_len or 1, job.train.global_batch, planning_job.structure)


def config_workload(path: Path, job: Job) -> Workload:
    """The model of a Hugging Face config with the job's batch."""
    from closeranks.facts.shapes.hf_config import read_hf_config

    shape = read_hf_config(path)
    if not job.data.seq_len:
        raise UserError("the job does not say how long its sequences are", "Set data.seq_len.")
    if shape.learned_positions and job.data.seq_len > shape.learned_positions:
        what = f"data.seq_len = {job.data.seq_len} is more than the {shape.learned_positions} positions of {path}"
        raise UserError(what, "Set data.seq_len to fewer.")
    return Workload(shape, job.data.seq_len, job.train.global_batch)


def transformer_constraints(workload: Workload, job: Job) -> LayoutConstraints:
    from closeranks.run.job.job import micro_batch_size

    shape = workload.transformer
    return LayoutConstraints(
        global_batch=workload.global_batch,
        micro_batch=micro_batch_size(job),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        ffn_dim=shape.expert_ffn_dim or shape.ffn_dim,
        seq_len=workload.seq_len,
    )


def _known_splits(constraints: LayoutConstraints, workload: Workload) -> LayoutConstraints:
    """A traced module is known unit by unit: not how it splits over a tensor axis, nor into more stages than blocks."""
    if isinstance(workload.shape, TransformerShape):
        return constraints
    num_layers = min(constraints.num_layers, workload.num_blocks)
    return replace(constraints, has_tensor_rules=False, num_layers=num_layers, num_heads=0)


def own_choice(job: Job, constraints: LayoutConstraints, cluster: Cluster) -> PlanChoice:
    from closeranks.run.job.job import layout_for

    return PlanChoice(
        layout=layout_for(job, cluster.num_devices),
        micro_batch=constraints.micro_batch,
        recompute=job.train.recompute,
        precision=_PLAN_PRECISIONS[job.train.precision],
        compiled=job.train.compile,
        optimizer=job.optim.name,
    )


def search_space(
    own: PlanChoice, constraints: LayoutConstraints, cluster: Cluster, keep: Collection[str]
) -> SearchSpace:
    """On GPUs compiled and with the fastest precision that the job or mixed precision offers, unless they are kept."""
    is_gpu = cluster.device.kind == "gpu"
    own_layout = own.layout if "layout" in keep else None
    peaks = cluster.device.peak_flops
    mixed: list[Precision] = [one for one in ("bf16", "fp16") if is_gpu and one in peaks]
    best = max([own.precision, *mixed[:1]], key=lambda one: peaks.get(one, 0.0))
    space = SearchSpace()
    schedules = (own.layout.schedule,) if "schedule" in keep else tuple(
        dict.fromkeys((*SEARCHED_SCHEDULES, own.layout.schedule))
    )  # fmt: skip
    sizes = (own.micro_batch,) if "micro-batch" in keep else tuple(sorted({*space.micro_batches, own.micro_batch}))
    return SearchSpace(
        micro_batches=tuple(size for size in sizes if size <= constraints.global_batch),
        recompute=(own.recompute,) if "recompute" in keep else space.recompute,
        precisions=(own.precision,) if "precision" in keep else (best,),
        compiled=(own.compiled,) if "compile" in keep or not is_gpu else (True,),
        schedules=schedules,
        zero_stages=(own.layout.zero,) if "zero" in keep else space.zero_stages,
        layout=own_layout,
    )


def compared_choice(text: str, asked: JobQuestion) -> PlanChoice:
    """``"tensor=8 data=8 micro_batch=2 recompute=full precision=bf16 compile=true offload=true"``: axes as in a layout,
    and settings of the plan. What is not said is the job's; data takes the devices that are left."""
    template, cluster = asked.question.template, asked.question.cluster
    axes, settings = [], {}
    for word in text.replace(",", " ").split():
        key, _, value = word.partition("=")
        if key in _SETTINGS:
            settings[key] = value
        else:
            axes.append(word)
    layout = Layout.parse(" ".join(axes))
    if not any(word.startswith("data=") for word in axes):
        others = layout.tensor * layout.pipeline * layout.context
        layout = replace(layout, data=max(1, cluster.num_devices // others))
    space = asked.question.space
    chosen = replace(template, layout=layout, precision=space.precisions[0], compiled=space.compiled[0])
    return _with_settings(chosen, settings)


_SETTINGS = ("micro_batch", "recompute", "precision", "compile", "offload", "virtual_stages")


def _with_settings(choice: PlanChoice, settings: dict[str, str]) -> PlanChoice:
    for key, value in settings.items():
        if key in ("micro_batch", "virtual_stages"):
            if not value.isdecimal() or (key == "micro_batch" and int(value) < 1):
                raise ConfigError([Problem(key, f"'{value}' is not a whole number", f"Write {key}=2, say.")])
            choice = replace(choice, **{key: int(value)})  # type: ignore[arg-type]
        elif key in ("compile", "offload"):
            name = "compiled" if key == "compile" else key
            choice = replace(choice, **{name: _one_of(key, value, ("true", "false")) == "true"})  # type: ignore[arg-type]
        else:
            known = ("none", "selective", "full") if key == "recompute" else ("fp32", "bf16", "fp16", "fp8")
            choice = replace(choice, **{key: _one_of(key, value, known)})  # type: ignore[arg-type]
    return choice


def _one_of(key: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError([Problem(key, f"there is no '{value}'", did_you_mean(value, known))])
    return value


def token_budget(text: str, job: Job, workload: Workload) -> float | None:
    """``300B`` tokens; empty: those of the job's steps, if it says how many."""
    per_step = job.train.global_batch * (job.data.seq_len or 1)
    if not text:
        return float(job.train.steps) * per_step if job.train.steps else None
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    budget = float(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else math.nan
    if not math.isfinite(budget) or budget <= 0:
        raise UserError(f"--tokens {text} is no number of tokens", "Write one such as 300B, 1.5T or 2e12.")
    if budget < per_step:
        raise UserError(
            f"a budget of {text} tokens is less than one step, which takes {per_step:,}",
            "Name more tokens, or a smaller train.global_batch.",
        )
    return budget


def _num_params(planning_job: PlanningJob) -> float:
    from closeranks.facts.shapes.model_structure import distinct_parameters

    return float(sum(weight.numel(1) for weight in distinct_parameters(planning_job.structure.units)))

"""A job as the planner's values: its model with its batch, and the way in which it would train on some workers.

Imports no torch. Invariant: what a plan is made of is what the job would train, the layout included.
"""

from __future__ import annotations

from closeranks.core.errors import UserError
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.layouts import PlanningJob
from closeranks.plan.step_time.workload import PlanChoice, Precision, Workload
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, layout_for, micro_batch_size

_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float64": "fp32", "bf16": "bf16", "fp16": "fp16"}


def planned_workload(job: Job, planning_job: PlanningJob | None = None) -> Workload:
    found = planning_job or describe_job(job)
    if found.llama is None:
        what = f"the time of a step of the model '{job.model.name}' cannot be planned: its products are not known"
        raise UserError(what, "Name a job with a Llama.")
    return Workload(from_llama(found.llama), job.data.seq_len, job.train.global_batch, found.structure)


def planned_choice(job: Job, num_workers: int) -> PlanChoice:
    return PlanChoice(
        layout=layout_for(job, num_workers),
        micro_batch=micro_batch_size(job),
        recompute=job.train.recompute,
        precision=_PRECISIONS[job.train.precision],
        compiled=job.train.compile,
        optimizer=job.optim.name,
    )

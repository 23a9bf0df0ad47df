"""Resizes a job when not all of its workers are available: finds the nearest legal layout for those that are.

Invariants: only the layout changes, so batches, the order of samples, learning rate and randomness stay the same; the
result passes ``check_workers``; more available workers never mean fewer in use; no rank gets a larger part of the model
as long as there are enough workers for the original tensor and pipeline axes. Imports no torch: agents decide with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from closeranks.agent.fault_limits import FaultLimits
from closeranks.data.sampling.cursor import Cursor, position_after
from closeranks.elastic.config import ElasticConfig
from closeranks.facts.layout import Layout, LayoutConstraints, pluralize
from closeranks.facts.nearest_layout import nearest_first
from closeranks.run.job.job import Job, check_workers, layout_constraints, layout_for, micro_batch_size
from closeranks.sync.local_sgd import replica_groups

_TABLE = ("data", "zero", "shard", "tensor", "pipeline", "schedule")


@dataclass(frozen=True, slots=True)
class ResizedJob:
    """A job adapted to a number of workers."""

    job: Job
    num_workers: int
    summary: str = ""
    """The differences from the job at its full size, for people; empty if there are none."""

    @property
    def layout(self) -> Layout:
        return layout_for(self.job, self.num_workers)


def resize_job(job: Job, num_available: int, num_wanted: int = 0) -> ResizedJob | None:
    """The job on at most ``num_available`` workers; None if it cannot run on so few or ``elastic.min_workers`` is more.

    ``job`` is the one the run was started with, never a resized one, so that a run can grow back to its full size.
    ``num_wanted``: how many workers that was; 0: what its layout says.
    """
    full = layout_for(job, num_wanted or num_available)
    for layout in _layouts(job, full, min(num_available, full.num_ranks)):
        num_workers = layout.num_ranks
        resized = job.model_copy(update={"sync": replica_groups.resized(job.sync, full, layout)})
        resized = resized if layout == layout_for(resized, num_workers) else _with_layout(resized, layout)
        if num_workers >= job.elastic.min_workers and not check_workers(resized, num_workers):
            summary = _summary(full, layout, job, resized) if num_wanted or job.layout.data else ""
            return ResizedJob(resized, num_workers, summary)
    return None


def _layouts(job: Job, full: Layout, most: int) -> Iterator[Layout]:
    """The candidates, best first.

    A job usually splits its model over workers because of its size. So the split is kept while there are enough
    workers, even if some stay idle; otherwise the finest possible split comes first. Then the layout with the most
    workers, then the nearest one. Replicas are removed as a whole if possible.
    """
    split = (full.tensor, full.pipeline, full.schedule)
    alike = (layout for layout in _near(job, full, most) if (layout.tensor, layout.pipeline, layout.schedule) == split)
    yield from replica_groups.whole_replica_groups(job.sync, full, _near(job, full, most))
    yield from alike
    yield from sorted(_near(job, full, most), key=lambda layout: -min(_fineness(layout), _fineness(full)))


def _near(job: Job, full: Layout, most: int) -> Iterator[Layout]:
    """All legal layouts of at most ``most`` ranks, the largest first; made lazily, as a thousand take a second."""
    needs = layout_constraints(job, micro_batch_size(job))
    for size in range(most, 0, -1):
        yield from (layout for layout in nearest_first(full, needs, size) if _is_sure(layout, full, needs, job))


def _fineness(layout: Layout) -> int:
    """Over how many ranks the weights are split."""
    shards = (layout.shard or layout.data) if layout.zero == 3 else 1
    return layout.tensor * layout.pipeline * shards


def _is_sure(layout: Layout, full: Layout, needs: LayoutConstraints, job: Job) -> bool:
    """Whether no check that needs the opened model and data can refuse the layout: a refusal then would end the run.

    A model that can be divided into some number of pipeline stages can be divided into fewer; a user's sharding table
    that splits by four also splits by two; a last step that is even over the data ranks is even over any divisor of
    them.
    """
    if layout.num_stages > full.num_stages or (needs.has_tensor_rules and full.tensor % layout.tensor):
        return False
    has_uneven_end = job.layout.batch_norm == "sync" and job.train.epochs is not None
    return not has_uneven_end or full.data % layout.data == 0


def _with_layout(job: Job, layout: Layout) -> Job:
    values = {name: getattr(layout, name) for name in _TABLE}
    return job.model_copy(update={"layout": job.layout.model_copy(update=values)})


def _summary(full: Layout, layout: Layout, job: Job, resized: Job) -> str:
    """``3 of 4 workers: layout data=4 zero=3 -> data=3 zero=3; ...``"""
    if layout == full:
        return ""
    change = f"layout {_text(full)} -> {_text(layout)}"
    if layout.pipeline > 1 and layout.schedule != full.schedule:
        change += f" by {layout.schedule}"
    summary = (
        f"{layout.num_ranks} of {pluralize(full.num_ranks, 'worker')}: {change}; same batch, order and learning rate"
    )
    if job.layout.batch_norm == "sync" and layout.data != full.data:
        summary += f", but batch norm is synchronised over {layout.data} data ranks instead of {full.data}"
    return "; ".join(filter(None, (summary, replica_groups.describe_resize(job.sync, resized.sync))))


def _text(layout: Layout) -> str:
    """Leaves out the schedule if there is no pipeline."""
    return str(layout if layout.pipeline > 1 else replace(layout, schedule="1f1b"))


def describe_samples(job: Job, step: int, ends: Sequence[Cursor] = ()) -> str:
    """Which samples a step takes, for people: by their position in the run's order, as ``data show`` counts."""
    first = position_after(step - 1, job.train.global_batch, ends)
    last = first + job.train.global_batch - 1
    return f"samples {first} to {last} of the run; `closeranks data show {first} JOB.toml` shows the first"


def fault_limits(config: ElasticConfig) -> FaultLimits:
    """The values of the table ``[elastic]`` that the agent needs."""
    return FaultLimits(**{field.name: getattr(config, field.name) for field in fields(FaultLimits)})

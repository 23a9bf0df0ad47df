"""What becomes of a job when not all of its workers can be had?

The nearest legal layout with as many workers as there are. Invariants: only the layout changes, so that batches, the
order of samples, learning rate and randomness stay what they were; what is found passes ``check_workers``; with more
workers at hand there are never fewer at work; no rank is given more of the model than it had while there are enough of
them for tensor and pipeline as they were. Imports no torch: agents decide with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from closeranks.agent.limits import Limits
from closeranks.data.cursor import Cursor, position_after
from closeranks.elastic.config import ElasticConfig
from closeranks.facts.layout import Demands, Layout, counted, divisors
from closeranks.facts.nearest import nearest_first
from closeranks.run.job import Job, check_workers, demands, layout_for, micro_batch_size

_TABLE = ("data", "zero", "shard", "tensor", "pipeline", "schedule")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A job as it runs on so many workers."""

    job: Job
    num_workers: int
    words: str = ""
    """What is different from the job at its full size, for people; empty where nothing is."""

    @property
    def layout(self) -> Layout:
        return layout_for(self.job, self.num_workers)


def fit(job: Job, num_available: int, num_wanted: int = 0) -> Fitted | None:
    """The job on at most ``num_available`` workers; None where it cannot run on so few, or does not want to.

    ``job`` is the one the run was started with, never a smaller one, so that a run grows back to what it was.
    ``num_wanted``: how many workers that was; 0: what its layout says.
    """
    full = layout_for(job, num_wanted or num_available)
    for layout in _layouts(job, full, min(num_available, full.num_ranks)):
        num_workers = layout.num_ranks
        fitted = _with_replicas(job, full, layout)
        fitted = fitted if layout == layout_for(fitted, num_workers) else _with_layout(fitted, layout)
        if num_workers >= job.elastic.min_workers and not check_workers(fitted, num_workers):
            words = _words(full, layout, job, fitted) if num_wanted or job.layout.data else ""
            return Fitted(fitted, num_workers, words)
    return None


def _layouts(job: Job, full: Layout, most: int) -> Iterator[Layout]:
    """What may be tried, best first.

    A job that splits its model over workers has a reason to, its size as a rule. So the split stays while there are
    enough of them, and some may stand by; else it stays as fine as can be. Then the most workers, then the nearest.
    Replicas that train apart leave whole where they can: what is left of one would make all of them train together.
    """
    split, width = (full.tensor, full.pipeline, full.schedule), _width(job, full)
    alike = (layout for layout in _near(job, full, most) if (layout.tensor, layout.pipeline, layout.schedule) == split)
    if width:
        yield from (layout for layout in _near(job, full, most) if _has_whole_replicas(layout, full, width))
    yield from alike
    yield from sorted(_near(job, full, most), key=lambda layout: -min(_fineness(layout), _fineness(full)))


def _near(job: Job, full: Layout, most: int) -> Iterator[Layout]:
    """All legal layouts of at most so many ranks, the largest first; made one by one, for a thousand take a second."""
    needs = demands(job, micro_batch_size(job))
    for size in range(most, 0, -1):
        yield from (layout for layout in nearest_first(full, needs, size) if _is_sure(layout, full, needs, job))


def _fineness(layout: Layout) -> int:
    """Over how many ranks the weights are split."""
    shards = (layout.shard or layout.data) if layout.zero == 3 else 1
    return layout.tensor * layout.pipeline * shards


def _is_sure(layout: Layout, full: Layout, needs: Demands, job: Job) -> bool:
    """Whether nothing that is only known once model and data are open can refuse it: that would end the run.

    A chain that filled so many stages fills fewer; a table of the user's own that splits by four also splits by two;
    a last step that came out even over the data ranks does so over any divisor of them.
    """
    if layout.num_stages > full.num_stages or (needs.has_tensor_rules and full.tensor % layout.tensor):
        return False
    has_uneven_end = job.layout.batch_norm == "sync" and job.train.epochs is not None
    return not has_uneven_end or full.data % layout.data == 0


def _with_layout(job: Job, layout: Layout) -> Job:
    values = {name: getattr(layout, name) for name in _TABLE}
    return job.model_copy(update={"layout": job.layout.model_copy(update=values)})


def _width(job: Job, full: Layout) -> int:
    """Data ranks of a replica that trains apart, where the job says how many of them there are; else 0."""
    local = job.sync.local
    return full.data // local.replicas if local.is_on and local.replicas else 0


def _has_whole_replicas(layout: Layout, full: Layout, width: int) -> bool:
    is_alike = (layout.tensor, layout.pipeline, layout.schedule) == (full.tensor, full.pipeline, full.schedule)
    return is_alike and layout.data % width == 0 and (layout.zero == 0 or layout.shard == full.shard)


def _with_replicas(job: Job, full: Layout, layout: Layout) -> Job:
    """Replicas that train apart stay as large as they are and become fewer; where that does not come out even, as many
    as there can be of those there were."""
    local, width = job.sync.local, _width(job, full)
    if not width:
        return job
    most = layout.data // ((layout.shard or layout.data) if layout.zero else 1)
    kept, rest = divmod(layout.data, width)
    if rest or not kept or most % kept:
        kept = max(number for number in divisors(most) if number <= local.replicas)
    sync = job.sync.model_copy(update={"local": local.model_copy(update={"replicas": kept})})
    return job.model_copy(update={"sync": sync})


def _words(full: Layout, layout: Layout, job: Job, fitted: Job) -> str:
    """``3 of 4 workers: layout data=4 zero=3 -> data=3 zero=3; ...``"""
    if layout == full:
        return ""
    said = f"layout {_text(full)} -> {_text(layout)}"
    if layout.pipeline > 1 and layout.schedule != full.schedule:
        said += f" by {layout.schedule}"
    words = f"{layout.num_ranks} of {counted(full.num_ranks, 'worker')}: {said}; batch, order and learning rate stay"
    if job.layout.batch_norm == "sync" and layout.data != full.data:
        words += f", but batch norm is synchronised over {layout.data} data ranks instead of {full.data}"
    before, now = (one.sync.local.replicas for one in (job, fitted))
    return words if now == before else f"{words}; {counted(now, 'replica')} of {before} train apart"


def _text(layout: Layout) -> str:
    """Without a schedule where there is nothing to schedule."""
    return str(layout if layout.pipeline > 1 else replace(layout, schedule="1f1b"))


def samples_of(job: Job, step: int, ends: Sequence[Cursor] = ()) -> str:
    """Which samples a step takes, in words: where they stand in the run's order, as ``data show`` counts."""
    first = position_after(step - 1, job.train.global_batch, ends)
    last = first + job.train.global_batch - 1
    return f"samples {first} to {last} of the run; `closeranks data show {first} JOB.toml` shows the first"


def limits_of(config: ElasticConfig) -> Limits:
    """What the agent needs of the table ``[elastic]``."""
    return Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})

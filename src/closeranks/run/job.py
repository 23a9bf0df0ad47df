"""What is a job? The root of all tables, and the problems no single table can see.

Imports no torch: the command line checks a job in milliseconds, on a laptop, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeranks.agent.config import AgentConfig
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.core.config.load import Loaded, load
from closeranks.core.config.table import Table
from closeranks.core.errors import ConfigError, Problem
from closeranks.data.config import DataConfig
from closeranks.elastic.config import ElasticConfig
from closeranks.facts.layout import Demands, Layout, counted, legal_problems
from closeranks.facts.nearest import advise
from closeranks.models.config import ModelConfig
from closeranks.optim.config import OptimConfig
from closeranks.parallel.config import LayoutConfig
from closeranks.run.config import RunConfig, TrainConfig
from closeranks.sync.config import SyncConfig
from closeranks.telemetry.config import TelemetryConfig


class Job(Table):
    """One training job. Every table but ``model``, ``data`` and ``train`` may be left out."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    layout: LayoutConfig = LayoutConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    elastic: ElasticConfig = ElasticConfig()
    agent: AgentConfig = AgentConfig()


def load_job(path: Path | None, overrides: Sequence[str] = (), extra: Mapping[str, Any] | None = None) -> Loaded[Job]:
    """The job of a file, Python tables and the command line, in that order; raises with all problems at once."""
    return load(Job, path, overrides, extra=extra, checks=(check_length, check_pairing, check_axes))


def check_length(job: Job) -> Iterable[Problem]:
    train = job.train
    if (train.steps is None) == (train.epochs is None):
        what = "neither steps nor epochs is given" if train.steps is None else "both steps and epochs are given"
        yield Problem("train.steps", what, "Write one of them, such as train.steps = 200.")
    if train.micro_batch > train.global_batch:
        what = f"a micro-batch of {train.micro_batch} samples does not fit a global batch of {train.global_batch}"
        yield Problem("train.micro_batch", what, f"Set it to {train.global_batch} or less.")


def check_pairing(job: Job) -> Iterable[Problem]:
    """Whether the model can read what the data holds; a user's own code is trusted to know."""
    need, have = job.model.reads, job.data.yields
    if need and have and need != have:
        what = f"model '{job.model.name}' reads {need}, but data '{job.data.name}' holds {have}"
        yield Problem("data.name", what, f"Choose data that holds {need}, or another model.")
    yield from _vocabulary_problems(job, job.data.vocab_size)


def _vocabulary_problems(job: Job, num_tokens: int) -> Iterable[Problem]:
    vocab = demands(job, 1).vocab_size
    if 0 < vocab < num_tokens:
        what = f"the data's vocabulary has {num_tokens} tokens, the model's only {vocab}"
        yield Problem("model.vocab_size", what, f"Set it to {num_tokens} or more.")


def check_vocabulary(job: Job, num_tokens: int) -> None:
    """``num_tokens``: what stored data turned out to hold when it was opened; 0 where it does not say."""
    if problems := list(_vocabulary_problems(job, num_tokens)):
        raise ConfigError(problems)


def check_axes(job: Job) -> Iterable[Problem]:
    """Axes that have their keys already and cannot be trained on yet."""
    for name in ("context", "expert"):
        value = getattr(job.layout, name)
        if value != 1:
            what = f"{value} is planned, but this version trains on the axes data, tensor and pipeline alone"
            yield Problem(f"layout.{name}", what, "Set it to 1.")


def layout_for(job: Job, num_workers: int) -> Layout:
    """The layout of this many workers: ``data = 0`` takes what the other axes leave."""
    table = job.layout
    others = table.tensor * table.pipeline * table.context
    return Layout(
        data=table.data or max(1, num_workers // max(1, others)),
        zero=table.zero,
        shard=table.shard,
        tensor=table.tensor,
        pipeline=table.pipeline,
        context=table.context,
        expert=table.expert,
        schedule=table.schedule,
    )


def check_workers(job: Job, num_workers: int, needs: Demands | None = None) -> list[Problem]:
    """Everything wrong with running this job on so many workers. ``needs``: what is known of a model that is built."""
    layout = layout_for(job, num_workers)
    problems: list[Problem] = []
    if layout.num_ranks not in (0, num_workers):  # 0: an axis is out of range, and that is what is told
        verb = "was" if num_workers == 1 else "were"
        what = f"the layout takes {counted(layout.num_ranks, 'worker')}, but {num_workers} {verb} asked for"
        problems.append(Problem("layout", what, f"Start with -n {layout.num_ranks}, or change the layout."))
    micro = micro_batch_size(job.train)
    needs = needs or demands(job, micro)
    problems += legal_problems(layout, needs)
    if problems:
        advice = advise(layout, needs, num_workers)
        problems[-1] = replace(problems[-1], fix=f"{problems[-1].fix} {advice}".rstrip())
    if job.layout.batch_norm == "sync" and -(-job.train.global_batch // micro) % layout.data:
        what = f"synchronised batch norm needs micro-batches that divide evenly among {layout.data} data ranks"
        problems.append(Problem("layout.batch_norm", what, "Change train.global_batch or train.micro_batch."))
    return problems


def micro_batch_size(train: TrainConfig) -> int:
    """Never a function of the workers: dropout, batch norm and rounding must not change with their number."""
    return train.micro_batch or max(1, train.global_batch // 8)


def demands(job: Job, micro_batch: int) -> Demands:
    return job.model.demands(seq_len=job.data.seq_len, global_batch=job.train.global_batch, micro_batch=micro_batch)

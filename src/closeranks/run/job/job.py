"""The training job: the root of all config tables, and the checks that need more than one table.

Imports no torch: the command line checks a job in milliseconds, on a laptop, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeranks.agent.config import AgentConfig
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.core.config.load import LoadedConfig, load
from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import ConfigError, Problem
from closeranks.data.config import DataConfig
from closeranks.elastic.config import ElasticConfig
from closeranks.facts.layout import Layout, LayoutConstraints, legal_problems, pluralize
from closeranks.facts.nearest_layout import nearest_layout_hint
from closeranks.models.config import ModelConfig
from closeranks.optim.config import OptimConfig
from closeranks.parallel.config import LayoutConfig
from closeranks.run.config import RunConfig, TrainConfig
from closeranks.sync.config import SyncConfig
from closeranks.sync.local_sgd import replica_groups
from closeranks.sync.server import roles as server_roles
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.step_range import parse_step_range


class Job(ConfigTable):
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


def load_job(
    path: Path | None, overrides: Sequence[str] = (), extra: Mapping[str, Any] | None = None
) -> LoadedConfig[Job]:
    """Merge a job file, Python tables and the command line, in that order; raises with all problems at once."""
    checks = (
        check_length,
        check_pairing,
        check_axes,
        check_compress,
        check_noise,
        check_replicas,
        check_servers,
        check_tables,
        check_rebalance,
        check_profile,
    )
    return load(Job, path, overrides, extra=extra, checks=checks)


def check_length(job: Job) -> Iterable[Problem]:
    train = job.train
    if (train.steps is None) == (train.epochs is None):
        if train.steps is None:
            what, fix = "neither steps nor epochs is given", "Write one of them, such as train.steps = 200."
        else:
            what = "both steps and epochs are given"
            fix = "Write one of them; ~train.epochs or ~train.steps on the command line unsets the other."
        yield Problem("train.steps", what, fix)
    if train.micro_batch > train.global_batch:
        what = f"a micro-batch of {train.micro_batch} samples does not fit a global batch of {train.global_batch}"
        yield Problem("train.micro_batch", what, f"Set it to {train.global_batch} or less.")


def check_profile(job: Job) -> Iterable[Problem]:
    """With a window beyond the last step the run would end without a trace and without a message."""
    steps = job.train.steps
    if steps is not None and (what := profile_warning(job, steps)):
        yield Problem("telemetry.profile", what, f"Choose among steps 1 to {steps}.")


def profile_warning(job: Job, num_steps: int) -> str:
    """Empty if the profiler's window contains a step of the run, or if there is no window."""
    window = parse_step_range(job.telemetry.profile)
    if window is None or window.first <= num_steps:
        return ""
    return f"steps {window.first} to {window.last} lie beyond the run's {num_steps}, so nothing would be traced"


def check_pairing(job: Job) -> Iterable[Problem]:
    """Whether the model can read what the data holds; a user's own model or data is not checked."""
    need, have = job.model.reads, job.data.yields
    if need and have and need != have:
        what = f"model '{job.model.name}' reads {need}, but data '{job.data.name}' holds {have}"
        yield Problem("data.name", what, f"Choose data that holds {need}, or another model.")
    yield from _vocabulary_problems(job, job.data.vocab_size)


def _vocabulary_problems(job: Job, num_tokens: int) -> Iterable[Problem]:
    vocab = layout_constraints(job, 1).vocab_size
    if 0 < vocab < num_tokens:
        what = f"the data's vocabulary has {num_tokens} tokens, the model's only {vocab}"
        yield Problem("model.vocab_size", what, f"Set it to {num_tokens} or more.")


def check_vocabulary(job: Job, num_tokens: int) -> None:
    """``num_tokens``: the vocabulary size of the data, known once it is open; 0 if the data does not say."""
    if problems := list(_vocabulary_problems(job, num_tokens)):
        raise ConfigError(problems)


def check_axes(job: Job) -> Iterable[Problem]:
    """Refuse axes that have config keys but are not implemented yet."""
    for name in ("context", "expert"):
        value = getattr(job.layout, name)
        if value != 1:
            what = f"{value} is planned, but this version only supports the axes data, tensor and pipeline"
            yield Problem(f"layout.{name}", what, "Set it to 1.")


def check_compress(job: Job) -> Iterable[Problem]:
    """Whether gradients may be compressed in this job."""
    config = job.sync.compress
    if config.name == "none":
        return
    if job.train.precision == "fp16":
        what = "the compression error of one step would be added in the next under another loss scale"
        yield Problem("sync.compress.name", what, 'Set train.precision = "bf16", or sync.compress.name = "none".')
    if job.layout.zero == 3 and job.layout.tensor > 1:
        what = "with zero=3, units hold parameters that tensor ranks replicate, and compression would make them diverge"
        yield Problem("sync.compress.name", what, 'Set layout.zero = 2 or less, or sync.compress.name = "none".')
    if config.name == "onebit" and job.optim.name not in ("adamw", "sgd"):
        what = f"onebit works with adamw and sgd, not with {job.optim.name}: it loses gradient magnitudes"
        yield Problem("sync.compress.name", what, 'Set optim.name = "adamw", or sync.compress.name = "int8".')
    steps = job.train.steps
    if steps is not None and config.num_warmup(steps) >= steps:
        what = f"the warm-up of {config.num_warmup(steps)} steps is as long as the run: nothing would be compressed"
        yield Problem("sync.compress.warmup", what, f"Set it below {steps}, or to a fraction such as 0.1.")
    if config.name == "onebit" and config.warmup == 0 and job.optim.name == "adamw":
        what = "without a warm-up adamw would have no second moments to divide by"
        yield Problem("sync.compress.warmup", what, "Set it to 0.1, or leave it out.")


def check_noise(job: Job) -> Iterable[Problem]:
    """Whether a rank has the whole gradients of a part of the batch: the noise scale is measured from those."""
    if not job.train.noise_every:
        return
    layout, train, off = job.layout, job.train, "or train.noise_every = 0"
    if layout.zero == 3 or layout.tensor * layout.pipeline > 1:
        axis = "zero = 3" if layout.zero == 3 else "the tensor axis" if layout.tensor > 1 else "the pipeline axis"
        what = f"the noise scale needs full gradients on a rank before the sum, and with {axis} no rank has them"
        yield Problem("train.noise_every", what, f"Use data ranks with layout.zero = 0, 1 or 2, {off}.")
    if micro_batch_size(job) >= train.global_batch:
        what = f"a step of {train.global_batch} samples is one micro-batch: there is no smaller one to compare it with"
        yield Problem("train.noise_every", what, f"Set train.micro_batch below {train.global_batch}, {off}.")


def check_replicas(job: Job) -> Iterable[Problem]:
    train = job.train
    return replica_groups.job_problems(
        job.sync,
        steps=train.steps,
        batch_norm=job.layout.batch_norm,
        noise_every=train.noise_every,
        ema=job.optim.ema,
    )


def check_servers(job: Job) -> Iterable[Problem]:
    return server_roles.job_problems(
        job.sync,
        batch_norm=job.layout.batch_norm,
        noise_every=job.train.noise_every,
        ema=job.optim.ema,
        precision=job.train.precision,
        deterministic=job.run.deterministic,
    )


def check_tables(job: Job) -> Iterable[Problem]:
    """Whether the rows of tables may be kept outside the model."""
    if not job.optim.tables.is_on:
        return
    place, off = "optim.tables.rule", 'or optim.tables.rule = "none"'
    if job.layout.tensor > 1 or job.layout.pipeline > 1:
        what = "rows of tables are exchanged among data ranks, and other axes split the model that reads them"
        yield Problem(place, what, f"Set layout.tensor and layout.pipeline to 1, {off}.")
    if job.sync.local.is_on:
        what = "with local SGD each replica would have rows of its own"
        yield Problem(place, what, f"Set sync.local.every = 0, {off}.")
    if job.sync.server.is_on and job.sync.server.mode == "async":
        what = "rows are updated once a step, and asynchronous servers update by every single push"
        yield Problem(place, what, f'Set sync.server.mode = "stale", {off}.')
    if job.sync.server.backup:
        what = "rows are updated by the gradients of all workers, and backup workers leave some out"
        yield Problem(place, what, f"Set sync.server.backup = 0, {off}.")
    if job.optim.ema:
        what = "the moving average is one of parameters, and rows of tables are none"
        yield Problem("optim.ema", what, f"Set it to 0, {off}.")
    if job.train.compile or job.train.recompute != "none":
        what = "rows are pulled in the middle of a forward, which can be neither compiled nor repeated"
        yield Problem(place, what, f'Set train.compile = false and train.recompute = "none", {off}.')
    if job.checkpoint.weights:
        what = "a file of weights holds no rows of tables"
        yield Problem("checkpoint.weights", what, f"Use checkpoint.resume instead, {off}.")


def check_rebalance(job: Job) -> Iterable[Problem]:
    """Whether data ranks may take different numbers of micro-batches."""
    if job.elastic.stragglers != "rebalance":
        return
    layout, place = job.layout, "elastic.stragglers"
    if layout.zero >= 2 and layout.hold != "step":
        verb = "gathers weights and reduces gradients" if layout.zero == 3 else "reduces gradients"
        what = f"zero = {layout.zero} {verb} over all data ranks in every micro-batch, so none can take fewer"
        yield Problem(place, what, 'Set layout.hold = "step", or layout.zero = 1, or use "evict".')
    if layout.batch_norm == "sync":
        what = "synchronised batch norm needs all data ranks in every forward, so none can take fewer micro-batches"
        yield Problem(place, what, 'Set layout.batch_norm = "micro", or use "evict".')
    if job.sync.local.is_on:
        what = "with local SGD data ranks do not wait for each other in every step"
        yield Problem(place, what, "Set sync.local.balance = true instead: it divides micro-batches over replicas.")
    if job.sync.server.is_on:
        what = "with parameter servers it is the mode that says whether workers wait for a slow one"
        yield Problem(place, what, 'Set sync.server.mode = "stale" instead, or use "evict".')


def layout_for(job: Job, num_workers: int) -> Layout:
    """The layout for this many workers: ``data = 0`` takes the workers that the other axes leave."""
    table = job.layout
    others = table.tensor * table.pipeline * table.context
    layout = Layout(
        data=table.data or max(1, num_workers // max(1, others)),
        zero=table.zero,
        shard=table.shard,
        tensor=table.tensor,
        pipeline=table.pipeline,
        context=table.context,
        expert=table.expert,
        schedule=table.schedule,
    )
    return server_roles.planned_layout(job.sync, replica_groups.planned_layout(job.sync, layout))


def check_workers(job: Job, num_workers: int, needs: LayoutConstraints | None = None) -> list[Problem]:
    """All problems of running this job on so many workers. ``needs``: the layout constraints of a model that is built;
    None: those that follow from the job."""
    layout = layout_for(job, num_workers)
    problems: list[Problem] = []
    if layout.num_ranks not in (0, num_workers):  # 0: an axis is out of range, which is reported instead
        verb = "was" if num_workers == 1 else "were"
        what = f"the layout takes {pluralize(layout.num_ranks, 'worker')}, but {num_workers} {verb} asked for"
        problems.append(Problem("layout", what, f"Start with -n {layout.num_ranks}, or change the layout."))
    micro = micro_batch_size(job)
    needs = replace(needs, num_servers=job.sync.server.count) if needs else layout_constraints(job, micro)
    problems += legal_problems(layout, needs)
    if problems:
        advice = nearest_layout_hint(layout, needs, num_workers)
        problems[-1] = replace(problems[-1], fix=f"{problems[-1].fix} {advice}".rstrip())
    if job.layout.batch_norm == "sync" and -(-job.train.global_batch // micro) % layout.data:
        what = f"synchronised batch norm needs micro-batches that divide evenly among {layout.data} data ranks"
        problems.append(Problem("layout.batch_norm", what, "Change train.global_batch or train.micro_batch."))
    room_problems = (room.layout_problems(job.sync, layout) for room in (replica_groups, server_roles))
    return problems or [problem for found in room_problems for problem in found]


_SMALL_CAP, _MIN_DIVISOR, _USUAL_DIVISOR = 16, 4, 8


def micro_batch_size(job: Job) -> int:
    """Never a function of the workers, the layout or the machine: dropout, batch norm and rounding must not change with
    them. Unless the job sets it, an eighth of the global batch; for data without a sequence length, at least a quarter
    of it or 16 samples, whichever is less."""
    whole = job.train.global_batch
    if job.train.micro_batch:
        return job.train.micro_batch
    usual = whole // _USUAL_DIVISOR
    return max(1, usual, 0 if job.data.seq_len else min(_SMALL_CAP, whole // _MIN_DIVISOR))


def layout_constraints(job: Job, micro_batch: int) -> LayoutConstraints:
    needs = job.model.layout_constraints(
        seq_len=job.data.seq_len, global_batch=job.train.global_batch, micro_batch=micro_batch
    )
    return replace(needs, num_servers=job.sync.server.count)

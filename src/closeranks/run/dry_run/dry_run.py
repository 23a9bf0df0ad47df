"""Dry-runs a job at any number of ranks, and compares what a rank holds and sends with the closed form.

One rank's step is run with the real code on tensors without data (``rank_step``); the closed form is the planner's own
(``plan.layouts``), for exactly the step that was run. Invariant: what of the job is not run is said in ``notes``, and
left out on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import CloseranksError, ConfigError, DataError, ModelError, UserError
from closeranks.core.protocols import Batch
from closeranks.core.registry import is_import_path
from closeranks.core.traffic import ring_sent_bytes
from closeranks.data.sources.open import open_source
from closeranks.facts.communication.comm_volume import CollectiveVolume
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh, MeshCoordinate
from closeranks.models.build import spec_for
from closeranks.models.flop_count import reason
from closeranks.plan.layouts import LayoutCost, RankCost, layout_cost
from closeranks.run.dry_run.rank_step import RankStep, run_rank_step
from closeranks.run.dry_run.sent_collectives import CollectiveKind
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, check_workers, layout_for, micro_batch_size

_NOT_RUN = frozenset({"the vote"})
"""Rows of the closed form that a dry run does not send: nothing reads them."""
Report = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure in closed form, and the same of the dry run."""

    name: str
    closed: int
    dry: int

    @property
    def difference(self) -> float | None:
        """Of the closed form, as a share of the dry run; None where there is nothing to compare with."""
        if self.dry:
            return self.closed / self.dry - 1
        return None if self.closed else 0.0


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One kind of collective on one axis, in one step."""

    axis: str
    operation: str
    num_ranks: int
    calls: Comparison
    sent_bytes: Comparison


@dataclass(frozen=True, slots=True)
class DryRun:
    layout: Layout
    rank: int
    pipeline_rank: int
    num_micro: int
    """Micro-batches that were run."""
    memory: tuple[Comparison, ...]
    """In bytes; the last row is the peak, the others are parts of it."""
    traffic: tuple[TrafficRow, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def peak(self) -> Comparison:
        return self.memory[-1]


def dry_run(job: Job, num_ranks: int, *, rank: int | None = None, num_micro: int = 0, report: Report = print) -> DryRun:
    """``rank`` None: the first of those that hold the most. ``num_micro``: at most so many micro-batches; 0: enough to
    fill the pipeline, and two without one."""
    started = time.monotonic()
    if problems := check_workers(job, num_ranks):
        raise ConfigError(problems)
    layout = layout_for(job, num_ranks)
    if rank is not None and not 0 <= rank < num_ranks:
        raise UserError(f"there is no rank {rank} among {num_ranks}", f"Name one from 0 to {num_ranks - 1}.")
    job, notes = _what_is_run(job)
    described = describe_job(job)
    if problems := check_workers(job, num_ranks, described.constraints):  # a user's own model is known only now
        raise ConfigError(problems)
    whole = described.num_micro(layout)
    count = min(whole, num_micro or max(2, 2 * layout.pipeline))
    if count < whole:
        notes = (*notes, f"{count} of {whole} micro-batches were run, and the closed form is of so many.")
        job = _with_batch(job, count * micro_batch_size(job) * layout.data)
        described = describe_job(job)
    cost = layout_cost(described, layout)
    chosen = _fullest_rank(cost) if rank is None else rank
    spec = spec_for(job.model, seq_len=job.data.seq_len)
    try:
        step = run_rank_step(job, layout, spec, _batch(job), rank=chosen, num_micro=count, report=report)
    except CloseranksError:
        raise
    except Exception as error:  # the user's model may do anything
        fix = "Let forward and loss depend on shapes, not on values, and call no collectives of their own."
        raise ModelError(f"the model cannot run without data: {reason(error)}", fix) from error
    coordinate = Mesh(layout).coordinate(chosen).pipeline
    expected = cost.ranks[coordinate]
    knows = described.llama is not None
    if not knows:
        notes = (*notes, "The closed form does not know this model's activations, nor what its axes send of them.")
    return DryRun(
        layout,
        chosen,
        coordinate,
        count,
        _memory(expected, step),
        _traffic(expected.volumes, step),
        notes,
        time.monotonic() - started,
    )


def _what_is_run(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job without what a dry run leaves out, and what that is."""
    notes, tables = [], dict[str, ConfigTable]()
    if job.train.compile:
        tables["train"] = job.train.model_copy(update={"compile": False})
        notes.append("Blocks were not compiled: compiled ones keep less.")
    if job.optim.ema:
        tables["optim"] = job.optim.model_copy(update={"ema": 0.0})
        notes.append("The moving average of the weights was left out.")
    if job.sync.gradients.name != "none" or job.sync.local.is_on:
        tables["sync"] = type(job.sync)()
        notes.append("Gradients were summed in every step, uncompressed.")
    if job.train.precision in ("bf16", "fp16") and getattr(job.model, "attention", "") == "auto":
        tables["model"] = job.model.model_copy(update={"attention": "flash"})
    return job.model_copy(update=tables), tuple(notes)


def _with_batch(job: Job, global_batch: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch": global_batch})})


def _fullest_rank(cost: LayoutCost) -> int:
    return Mesh(cost.layout).rank_of(MeshCoordinate(cost.fullest.pipeline, 0, 0, 0))


def _batch(job: Job) -> Batch:
    """A micro-batch of the shapes that the job's data has: its first sample, over and over."""
    size = micro_batch_size(job)
    if job.data.seq_len and not is_import_path(job.model.name):
        return {"tokens": torch.zeros(size, job.data.seq_len + 1, dtype=torch.int64)}
    try:
        return open_source(job.data, "train", job.run.seed).read(np.zeros(size, dtype=np.int64))
    except DataError as error:
        raise DataError(f"a dry run needs a sample of the job's data: {error.what}", error.fix) from error


def _memory(expected: RankCost, step: RankStep) -> tuple[Comparison, ...]:
    parameters = Comparison("weights", expected.state.parameters, step.parameter_bytes)
    optimizer = Comparison("optimizer state", expected.state.optimizer, step.optimizer_bytes)
    peak = Comparison("peak", expected.total_bytes, step.peak_bytes)
    rest = Comparison(
        "gradients, buffers, activations",
        peak.closed - parameters.closed - optimizer.closed,
        peak.dry - parameters.dry - optimizer.dry,
    )
    return parameters, optimizer, rest, peak


def _traffic(volumes: Iterable[CollectiveVolume], step: RankStep) -> tuple[TrafficRow, ...]:
    calls, payloads = dict[CollectiveKind, int](), dict[CollectiveKind, int]()
    for volume in volumes:
        if volume.what not in _NOT_RUN:
            kind = CollectiveKind(volume.axis, volume.operation, volume.num_ranks)
            calls[kind] = calls.get(kind, 0) + volume.calls
            payloads[kind] = payloads.get(kind, 0) + volume.payload_bytes
    kinds = dict.fromkeys([*calls, *step.sent.calls])
    return tuple(
        TrafficRow(
            *kind,
            Comparison("calls", calls.get(kind, 0), step.sent.calls[kind]),
            Comparison("bytes", _sent(kind, payloads.get(kind, 0)), _sent(kind, step.sent.payload_bytes[kind])),
        )
        for kind in kinds
    )


def _sent(kind: CollectiveKind, payload: int) -> int:
    return payload if kind.operation == "send" else ring_sent_bytes(kind.operation, kind.num_ranks, payload)

"""Evaluates the model on held-out data.

Each data rank evaluates its share of the samples, and one all-reduce sums loss, weight and metrics; a second one joins
the values of the samples for models that rank them all (``SampleMetrics``). Invariant: the result does not depend on
the layout, and an evaluation does not change training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from closeranks.core.errors import DataError
from closeranks.core.events import Evaluated
from closeranks.core.protocols import DataSource, Loss, SampleMetrics
from closeranks.core.seeds import derive_seed
from closeranks.data.loading.batch_reader import LoadedBatch, map_tensors
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.sample_reader import read_samples
from closeranks.data.sampling.order import MicroBatch
from closeranks.data.source import as_loader_source
from closeranks.run.builder.context import RunContext
from closeranks.run.job.job import micro_batch_size
from closeranks.run.step.engine import Engine
from closeranks.run.step.loss_sums import LossSums
from closeranks.run.step.pipeline_callbacks import MicroBatchCallbacks
from closeranks.run.step.sample_values import SampleValues
from closeranks.run.step.step import seed_generators
from closeranks.sync.server.roles import roles


def evaluate(engine: Engine, source: DataSource | None, step: int) -> Evaluated:
    if source is None:
        raise DataError("there is no held-out data to evaluate on", "Set data.eval_fraction, or pass eval_data.")
    started_at = time.monotonic()
    job, module = engine.context.job, engine.model.module
    modes = [(part, part.training) for part in module.modules()]  # a user may train with some modules in eval mode
    for before in reversed(engine.components.phases["before_evaluation"]):
        before()
    module.eval()
    try:
        values = _sample_values(engine, source)
        sums = _sums(engine, source, values)
    finally:
        for after in engine.components.phases["after_evaluation"]:
            after()
        for part, was_training in modes:
            part.training = was_training
    num_bad, loss, weight, *metrics = engine.context.groups.world.sum(sums).tolist()
    weight = weight or 1.0
    if num_bad > job.data.max_bad:
        what = f"{num_bad:.0f} bad samples in the evaluation data, more than data.max_bad = {job.data.max_bad}"
        raise DataError(what, "`closeranks data verify` lists them; fix the data, or raise data.max_bad.", step=step)
    named = {name: value / weight for name, value in zip(engine.model.spec.metrics, metrics, strict=True)}
    if values is not None and isinstance(engine.model.spec, SampleMetrics):
        named |= engine.model.spec.sample_metrics(values.joined(engine.context.groups.world.sum))
    return Evaluated(
        step=step,
        loss=loss / weight,
        weight=weight,
        metrics=named,
        seconds=time.monotonic() - started_at,
        num_bad=round(num_bad),
    )


def _sample_values(engine: Engine, source: DataSource) -> SampleValues | None:
    """Room for the values of all samples, if the model has metrics of them."""
    context, spec = engine.context, engine.model.spec
    if not isinstance(spec, SampleMetrics):
        return None
    return SampleValues(spec.sample_values, _num_evaluated(context, len(source)), context.device)


def _num_evaluated(context: RunContext, num_samples: int) -> int:
    return min(num_samples, context.job.train.eval_samples or num_samples)


def _sums(engine: Engine, source: DataSource, values: SampleValues | None) -> Tensor:
    """Bad samples, loss, weight and metrics over this rank's share, in float64; fills in the samples' values."""
    context, model = engine.context, engine.model
    loss_sums = LossSums(model.spec.metrics, context.device, reports_loss=context.reports_loss)
    num_bad = 0

    def read(planned: MicroBatch) -> LoadedBatch:
        nonlocal num_bad
        loaded = _read(context, source, planned)
        num_bad += len(loaded.skipped) if engine.batches.counts_samples and not planned.is_padding else 0
        return loaded

    def count(micro_batch: MicroBatch, loss: Loss) -> Tensor:
        if not micro_batch.is_padding:
            loss_sums.add(loss)
            if values is not None and context.reports_loss:
                values.add(micro_batch.first, loss.samples)
        return loss.total

    def seed(micro_batch: MicroBatch, stage: int = 0) -> None:
        seed_generators(context.device, derive_seed(context.job.run.seed, "eval", micro_batch.index))

    with torch.no_grad():
        share = list(_share(context, len(source), is_even=engine.reducer.needs_equal_counts))
        _prefetch(source, share)
        if model.pipeline is not None:
            size = num_pipelined_micro_batches(context.layout.num_stages)
            for first in range(0, len(share), size):
                wave = [read(micro_batch) for micro_batch in share[first : first + size]]
                model.pipeline.forward_only(
                    MicroBatchCallbacks(model, engine.reducer, context.step_timer, wave, seed, count)
                )
        for micro_batch in share if model.pipeline is None else ():
            loaded = read(micro_batch)
            seed(micro_batch)
            with model.precision.context(context.device):
                count(loaded.micro_batch, model.spec.loss(model.module, model.precision.cast(loaded.batch)))
            context.step_timer.micro_batch_done()
    vector = loss_sums.as_vector()
    return torch.cat([vector.new_tensor([num_bad]), vector])


def _prefetch(source: DataSource, share: Sequence[MicroBatch]) -> None:
    """Let remote data be fetched in the order in which it will be read."""
    ids = [np.arange(micro_batch.first, micro_batch.last, dtype=np.int64) for micro_batch in share]
    if ids:
        as_loader_source(source).prefetch(np.concatenate(ids))


def num_pipelined_micro_batches(num_stages: int) -> int:
    """Micro-batches that are read and fed to the pipeline at once: many per stage, or it mostly fills and drains."""
    return max(8, 4 * num_stages)


def _share(context: RunContext, num_samples: int, *, is_even: bool) -> Iterator[MicroBatch]:
    """This data rank's micro-batches, one in every ``data.size``. If each forward is a collective (``is_even``), a rank
    that has one less repeats the last one as padding."""
    limit = _num_evaluated(context, num_samples)
    size, data = micro_batch_size(context.job), context.groups.data
    workers = roles(context.job.sync, data.size)
    rank, count = workers.worker_rank(data.rank), -(-limit // size)
    if rank is None:
        return
    for first in range(0, count, workers.num_workers):
        number = first + rank
        if number < count or is_even:
            index = min(number, count - 1)
            yield MicroBatch(0, index, index * size, min(index * size + size, limit), is_padding=number >= count)


def _read(context: RunContext, source: DataSource, micro_batch: MicroBatch) -> LoadedBatch:
    """Follows the job's rules for bad samples. A micro-batch of bad samples alone is computed and not counted."""
    ids = np.arange(micro_batch.first, micro_batch.last, dtype=np.int64)
    rows = read_samples(source, ids, ReadSettings.of(context.job.data))
    if rows.skipped:
        is_padding = micro_batch.is_padding or rows.num_rows == 0
        micro_batch = replace(micro_batch, is_padding=is_padding, num_skipped=len(rows.skipped))
    return LoadedBatch(micro_batch, map_tensors(rows.batch, lambda tensor: tensor.to(context.device)), rows.skipped)

"""How good is the model on data it has not learned from?

Each data rank judges its share of the held-out samples and one all-reduce adds up loss, weight and metrics. Invariant:
the result does not depend on the layout, and evaluating leaves no trace in training.
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
from closeranks.core.keys import derive_seed
from closeranks.core.protocols import Loss, Source
from closeranks.data.order import MicroBatch
from closeranks.data.reader import Loaded, map_tensors
from closeranks.data.rows import read_plain
from closeranks.data.settings import ReadSettings
from closeranks.data.source import placed
from closeranks.run.job import micro_batch_size
from closeranks.run.parts import Parts
from closeranks.run.step import seed_streams
from closeranks.run.tally import Tally
from closeranks.run.work import PipelineWork


def evaluate(parts: Parts, step: int) -> Evaluated:
    if parts.eval_source is None:
        raise DataError("there is no held-out data to evaluate on", "Set data.eval_fraction, or pass eval_data.")
    started_at = time.monotonic()
    modes = [(part, part.training) for part in parts.module.modules()]  # a user may train with parts of it at rest
    parts.module.eval()
    try:
        sums = _sums(parts, parts.eval_source)
    finally:
        for part, was_training in modes:
            part.training = was_training
    num_bad, loss, weight, *metrics = parts.groups.world.sum(sums).tolist()
    weight = weight or 1.0
    if num_bad > parts.job.data.max_bad:
        what = f"{num_bad:.0f} bad samples in the evaluation data, more than data.max_bad = {parts.job.data.max_bad}"
        raise DataError(what, "`closeranks data verify` names them; mend the data, or raise data.max_bad.", step=step)
    return Evaluated(
        step=step,
        loss=loss / weight,
        weight=weight,
        metrics={name: value / weight for name, value in zip(parts.spec.metrics, metrics, strict=True)},
        seconds=time.monotonic() - started_at,
        num_bad=round(num_bad),
    )


def _sums(parts: Parts, source: Source) -> Tensor:
    """Bad samples, loss, weight and metrics over this rank's share, in float64."""
    tally = Tally(parts.spec.metrics, parts.device, speaks=parts.speaks)
    num_bad = 0

    def read(planned: MicroBatch) -> Loaded:
        nonlocal num_bad
        loaded = _read(parts, source, planned)
        num_bad += len(loaded.skipped) if parts.supply.speaks and not planned.is_spare else 0
        return loaded

    def count(micro_batch: MicroBatch, loss: Loss) -> Tensor:
        if not micro_batch.is_spare:
            tally.add(loss)
        return loss.total

    def key(micro_batch: MicroBatch, stage: int = 0) -> None:
        seed_streams(parts.device, derive_seed(parts.job.run.seed, "eval", micro_batch.index))

    with torch.no_grad():
        share = list(_share(parts, len(source)))
        _want(source, share)
        if parts.pipeline is not None:
            size = wave_size(parts.layout.num_stages)
            for first in range(0, len(share), size):
                wave = [read(micro_batch) for micro_batch in share[first : first + size]]
                parts.pipeline.forward_only(PipelineWork(parts, wave, key, count))
        for micro_batch in share if parts.pipeline is None else ():
            loaded = read(micro_batch)
            key(micro_batch)
            with parts.precision.context(parts.device):
                count(loaded.micro_batch, parts.spec.loss(parts.module, parts.precision.cast(loaded.batch)))
            parts.pace.tick()
    row = tally.row()
    return torch.cat([row.new_tensor([num_bad]), row])


def _want(source: Source, share: Sequence[MicroBatch]) -> None:
    """What lies far away is fetched in the order it will be read."""
    ids = [np.arange(micro_batch.first, micro_batch.last, dtype=np.int64) for micro_batch in share]
    if ids:
        placed(source).want(np.concatenate(ids))


def wave_size(num_stages: int) -> int:
    """Micro-batches that a pipeline takes in before the next are read: many a stage, or it mostly fills and drains."""
    return max(8, 4 * num_stages)


def _share(parts: Parts, num_samples: int) -> Iterator[MicroBatch]:
    """Every so many-th micro-batch. Where each forward is a collective, ranks with one less repeat the last."""
    limit = min(num_samples, parts.job.train.eval_samples or num_samples)
    size, data = micro_batch_size(parts.job), parts.groups.data
    count = -(-limit // size)
    for first in range(0, count, data.size):
        number = first + data.rank
        if number < count or parts.reducer.needs_equal_counts:
            index = min(number, count - 1)
            yield MicroBatch(0, index, index * size, min(index * size + size, limit), is_spare=number >= count)


def _read(parts: Parts, source: Source, micro_batch: MicroBatch) -> Loaded:
    """By the job's rules for bad samples. One that is bad throughout is worked off with others and counts nothing."""
    ids = np.arange(micro_batch.first, micro_batch.last, dtype=np.int64)
    rows = read_plain(source, ids, ReadSettings.of(parts.job.data))
    if rows.skipped:
        is_spare = micro_batch.is_spare or rows.num_rows == 0
        micro_batch = replace(micro_batch, is_spare=is_spare, num_skipped=len(rows.skipped))
    return Loaded(micro_batch, map_tensors(rows.batch, lambda tensor: tensor.to(parts.device)), rows.skipped)

"""How good is the model on data it has not learned from?

Each rank judges its share of the held-out samples and one all-reduce adds up loss, weight and metrics. Invariant: the
result does not depend on the number of ranks, and evaluating leaves no trace in training.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from closeranks.core.errors import DataError
from closeranks.core.events import Evaluated
from closeranks.core.keys import derive_seed
from closeranks.core.protocols import Source
from closeranks.data.reader import map_tensors
from closeranks.run.job import micro_batch_size
from closeranks.run.parts import Parts
from closeranks.run.step import seed_streams


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
    loss, weight, *metrics = parts.group.sum(sums).tolist()
    weight = weight or 1.0
    return Evaluated(
        step=step,
        loss=loss / weight,
        weight=weight,
        metrics={name: value / weight for name, value in zip(parts.spec.metrics, metrics, strict=True)},
        seconds=time.monotonic() - started_at,
    )


def _sums(parts: Parts, source: Source) -> torch.Tensor:
    """Loss, weight and metrics over this rank's share, in float64."""
    limit = min(len(source), parts.job.train.eval_samples or len(source))
    size = micro_batch_size(parts.job.train)
    sums = torch.zeros(2 + len(parts.spec.metrics), dtype=torch.float64, device=parts.device)
    with torch.no_grad():
        for number, first in enumerate(range(0, limit, size)):
            if number % parts.group.size != parts.group.rank:
                continue
            batch = source.read(np.arange(first, min(first + size, limit)))
            placed = map_tensors(parts.precision.cast(batch), lambda tensor: tensor.to(parts.device))
            seed_streams(parts.device, derive_seed(parts.job.run.seed, "eval", number))
            with parts.precision.context(parts.device):
                loss = parts.spec.loss(parts.module, placed)
            row = [loss.total, loss.weight, *(loss.metrics[name] for name in parts.spec.metrics)]
            sums += torch.stack([torch.as_tensor(v, dtype=torch.float64, device=parts.device) for v in row])
    return sums

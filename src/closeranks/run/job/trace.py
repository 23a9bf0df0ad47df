"""Traces a job's own module for planning: what does one of its samples cost?

The module is built on the meta device and run on tensors without data; one sample of the job's data gives their shapes.
Imports torch. Invariant: nothing is trained or stored; what stands in the way is said in the trace, and the plan goes
on with what is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from closeranks.core.errors import CloseranksError
from closeranks.core.protocols import Batch, Loss, ModelSpec
from closeranks.data.sampling.order import Ints
from closeranks.data.sources.open import open_source
from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.models.module_trace import trace_module, untraced
from closeranks.parallel.precision import Precision
from closeranks.run.job.job import Job


def trace_job(job: Job, spec: ModelSpec, module: nn.Module, units: Sequence[str]) -> ModuleTrace:
    """``module``: what the spec built. ``units``: as in the model's structure."""
    precision = Precision(job.train.precision)
    try:
        source = open_source(job.data, "train", job.run.seed)
        source.read(_first_sample(1))
    except CloseranksError as error:
        why = f"no sample of its data could be read ({error.what.rstrip('.')})"
        return untraced(module, why, units=units, blocks=spec.blocks, precision=precision.name)

    def compute_loss(copied: nn.Module, batch: Batch) -> Loss:
        with precision.context(torch.device("cpu")):
            return spec.loss(copied, batch)

    return trace_module(
        module,
        lambda num_samples: precision.cast(source.read(_first_sample(num_samples))),
        compute_loss,
        units=units,
        blocks=spec.blocks,
        precision=precision.name,
    )


def _first_sample(times: int) -> Ints:
    """The same sample again: samples of different sizes would not show what one costs."""
    return np.zeros(times, dtype=np.int64)

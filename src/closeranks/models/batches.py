"""Reads a model's inputs from a batch, with clear errors where they are missing.

Invariant: data that does not fit the model raises an error in the user's terms (which keys are there, which are
missing), never a bare KeyError.
"""

from __future__ import annotations

from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Batch


def batch_tensor(batch: Batch, key: str, model: str) -> Tensor:
    """The tensor under ``key`` that the model named ``model`` reads."""
    if key not in batch:
        found = ", ".join(sorted(batch)) or "nothing"
        fix = f"Choose data that gives '{key}', or another model."
        raise ModelError(f"the model '{model}' reads '{key}', but the data gives {found}", fix)
    tensor: Tensor = batch[key]
    return tensor


def num_samples(batch: Batch) -> int:
    """Samples of a batch: the length of its first tensor along dim 0."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim > 0:
            return value.shape[0]
    raise ModelError("the batch holds no tensor with a sample dim", "A batch maps names to tensors [samples, ...].")

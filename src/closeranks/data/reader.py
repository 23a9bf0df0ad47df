"""What are a rank's batches of one step, as tensors in host memory?

Invariant: what leaves here has the rows it was asked for and, where asked, finite values only; whatever goes wrong
while reading is a ``DataError`` that names the data and the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from closeranks.core.blame import describe
from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.protocols import Batch, Source
from closeranks.data.order import Ints, MicroBatch, OrderWindow, Schedule


@dataclass(frozen=True, slots=True)
class Loaded:
    """A micro-batch with its samples."""

    micro_batch: MicroBatch
    batch: Batch


@dataclass(slots=True)
class Reader:
    """Reads what one data rank needs; holds no place in the run."""

    source: Source
    schedule: Schedule
    seed: int
    data_rank: int = 0
    data_size: int = 1
    check_finite: bool = True
    even: bool = False
    """Whether ranks with fewer micro-batches read a spare."""
    _order: OrderWindow = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._order = OrderWindow(self.schedule.num_samples, self.seed)

    def read(self, step: int) -> list[Loaded]:
        """This rank's micro-batches of a step; none where the step has fewer micro-batches than ranks."""
        assigned = self.schedule.assigned(step, self.data_rank, self.data_size, even=self.even)
        return [Loaded(micro_batch, self._read_one(micro_batch)) for micro_batch in assigned]

    def _read_one(self, micro_batch: MicroBatch) -> Batch:
        indices = self._order.indices(micro_batch.first, micro_batch.last)
        try:
            batch = self.source.read(indices)
        except CloseranksError:
            raise
        except Exception as error:
            what = f"reading {name_samples(indices)} of {self.source.identity} raised {describe(error)}"
            raise DataError(what, "Mend the dataset, or remove the sample from it.") from error
        check_shape(batch, indices, self.source.identity)
        if self.check_finite:
            check_values(batch, indices, self.source.identity)
        return batch


def name_samples(indices: Ints, limit: int = 8) -> str:
    """``sample 3``, or ``samples 3, 5 and 70 more``."""
    shown = ", ".join(str(int(index)) for index in indices[:limit])
    rest = f" and {len(indices) - limit} more" if len(indices) > limit else ""
    return f"sample{'s' if len(indices) > 1 else ''} {shown}{rest}"


def map_tensors(value: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in its dicts, lists and tuples replaced; anything else stays as it is."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, apply) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, apply) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def check_shape(batch: Any, indices: Ints, identity: str) -> None:
    """A batch is a dict of tensors with one row for each sample asked for."""
    if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
        what = f"read() of {identity} returned {type(batch).__name__}, not a dict of tensors"
        raise DataError(what, "Return named tensors whose first dim is the sample.")
    for key, value in batch.items():
        if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] != len(indices)):
            what = f"'{key}' of {identity} has shape {tuple(value.shape)} for {len(indices)} samples"
            raise DataError(what, "The first dim of every tensor in a batch is the sample.")


def check_values(batch: Batch, indices: Ints, identity: str) -> None:
    """NaN or infinity in the data would only show as a loss that is not finite, far from its cause."""
    for key, value in batch.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        finite = torch.isfinite(value)
        if not bool(finite.all()):
            rows = (~finite.flatten(1).all(dim=1) if finite.dim() > 1 else ~finite).numpy()
            what = f"'{key}' of {identity} holds NaN or infinity in {name_samples(indices[rows])}"
            raise DataError(what, "Clean or remove these samples, or set data.check_finite = false to let them in.")

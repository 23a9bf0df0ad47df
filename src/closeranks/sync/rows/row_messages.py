"""What workers and servers say to each other about rows.

    worker -> server   header, keys             pull: the server answers with the rows, in the order of the keys
    worker -> server   header, keys, values     push: the gradients of one micro-batch
    worker -> server   header                   finish: no more pushes of this step, or pulls of this evaluation

Keys and values are those of all widths, one after the other; the header says how many there are of each. Invariant: the
messages of one worker are served in the order in which it sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

PULL_PHASE, PUSH_PHASE, SERVE_PHASE = "data.pull_rows", "data.push_rows", "data.serve_rows"
EVALUATION = -1
"""Stands for the step in the messages of an evaluation."""


class RowVerb(IntEnum):
    PULL = 0
    PUSH = 1
    FINISH = 2


@dataclass(frozen=True, slots=True)
class RowHeader:
    verb: RowVerb
    step: int
    counts: tuple[int, ...]
    """How many keys of each width follow."""

    def encode(self) -> Tensor:
        return torch.tensor([self.verb, self.step, *self.counts], dtype=torch.int64)

    @classmethod
    def decode(cls, tensor: Tensor) -> RowHeader:
        verb, step, *counts = tensor.tolist()
        return cls(RowVerb(verb), step, tuple(counts))

    @property
    def num_keys(self) -> int:
        return sum(self.counts)

    def num_values(self, dims: Sequence[int]) -> int:
        return sum(count * dim for count, dim in zip(self.counts, dims, strict=True))

    def rows_of(self, values: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Views of the rows of each width."""
        sizes = [count * dim for count, dim in zip(self.counts, dims, strict=True)]
        return [part.view(-1, dim) for part, dim in zip(values.split(sizes), dims, strict=True)]

"""The values of all samples of an evaluation, joined over ranks.

Each rank writes those of its samples into a table of zeros, and one all-reduce adds up the tables. Invariant: of the
ranks that work on the same micro-batch only one writes its values, so the result is the same bits under every layout,
in the order of the samples. Cost: 8 bytes for each name and sample, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class SampleValues:
    """A column per name, and one that says for which samples there are values: bad samples have none."""

    def __init__(self, names: Sequence[str], num_samples: int, device: torch.device) -> None:
        self._names = tuple(names)
        self._table = torch.zeros(len(names) + 1, num_samples, dtype=torch.float64, device=device)

    def add(self, first: int, values: Mapping[str, Tensor]) -> None:
        """The values of a micro-batch whose first sample is ``first``; where bad samples were left out, those that
        follow move up."""
        for column, name in zip(self._table, self._names, strict=False):
            column[first : first + len(values[name])] = values[name].detach()
        self._table[-1, first : first + len(values[self._names[0]])] = 1.0

    def joined(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Each name's values, of all ranks."""
        table = sum_over_ranks(self._table)
        there = table[-1] > 0
        return {name: column[there] for name, column in zip(self._names, table, strict=False)}

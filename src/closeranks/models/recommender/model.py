"""The recommender: how do dense values and ids become the log-odds of a click?

As DLRM (Naumov et al. 2019): an MLP turns the dense values into a vector, tables give one for each feature, and a
second MLP reads that first vector and the dot products of all pairs of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.facts.shapes.recommender import RecommenderShape
from closeranks.models.table import Table, Tables


class Mlp(nn.ModuleList):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(nn.Linear(num_in, num_out) for num_in, num_out in pairwise(widths))

    def forward(self, hidden: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            hidden = layer(F.relu(hidden) if number else hidden)
        return hidden


class Recommender(nn.Module):
    """Dense values [batch, num_dense] and ids [batch, features, ids of a bag] in, log-odds [batch] out."""

    def __init__(self, shape: RecommenderShape, *, hashed: bool = False) -> None:
        super().__init__()
        self.bottom = Mlp(shape.bottom_widths)
        names = (f"tables.{number}" for number in range(shape.features))
        self.tables = Tables(Table(name, shape.rows, shape.dim, "sum", hashed=hashed) for name in names)
        self.top = Mlp(shape.top_widths)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = [first, *self.tables(ids.unbind(1))]
        stacked = torch.stack([vector.to(first.dtype) for vector in vectors], dim=1)
        dots = stacked @ stacked.transpose(1, 2)
        row, column = torch.triu_indices(len(vectors), len(vectors), 1, device=dots.device)
        logits: Tensor = self.top(torch.cat((first, dots[:, row, column]), dim=1))
        return logits.squeeze(1)

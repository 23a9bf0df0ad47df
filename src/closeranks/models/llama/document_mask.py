"""Document masking: attention mask, positions and targets for rows that pack several documents.

``documents`` [batch, positions] numbers the document of each token, -1 where there is none (padding). Invariant: a
document in a row gets the results that it would get alone: its positions count from its own beginning, it attends to
its own tokens only, and the last token of a document does not predict the first of the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DocumentAttention(NamedTuple):
    """The inputs of attention that separate the documents of each row; computed once for all blocks."""

    cos: Tensor
    """Rotary tables of each token's own position. [batch, positions, half of a head]"""
    sin: Tensor
    bias: Tensor
    """0 where a token attends to another, minus infinity where it does not; one for all heads, in the dtype of the
    scores, so that all blocks keep the same tensor for backward. [batch, 1, positions, positions]"""


def document_attention(documents: Tensor, cos: Tensor, sin: Tensor) -> DocumentAttention:
    """``cos`` and ``sin`` [longest, half of a head]: the tables by position. No host sync."""
    positions = document_positions(documents)
    return DocumentAttention(cos[positions], sin[positions], _bias(documents, _score_dtype(cos)))


def document_positions(documents: Tensor) -> Tensor:
    """The position of each token within its document."""
    positions = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - torch.where(begins, positions, 0).cummax(dim=1).values


def target_mask(documents: Tensor) -> Tensor:
    """Which targets continue the document of their input; ``documents`` are those of [batch, positions + 1] tokens."""
    return (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)


def _bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Padding attends to padding: a row of scores that are all minus infinity has no softmax."""
    positions = torch.arange(documents.shape[1], device=documents.device)
    is_visible = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (positions.unsqueeze(1) >= positions)
    return torch.zeros((), dtype=dtype, device=documents.device).where(is_visible, float("-inf")).unsqueeze(1)


def _score_dtype(table: Tensor) -> torch.dtype:
    device = table.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else table.dtype

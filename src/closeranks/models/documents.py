"""How do documents that share a row stay strangers to each other?

``documents`` [batch, positions] numbers the document that each token belongs to, -1 where there is none (padding).
Invariant: a document in a row computes what it would alone: its positions count from its own beginning, it sees its own
tokens only, and the step from one document to the next is nobody's target.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Apart(NamedTuple):
    """What attention needs to keep the documents of each row apart; made once for all blocks."""

    cos: Tensor
    """Rotary tables of each token's own position. [batch, positions, half of a head]"""
    sin: Tensor
    bias: Tensor
    """0 where a token sees another, minus infinity where it does not; one for all heads, in the format the scores are
    computed in, so that all blocks keep the same tensor for backward. [batch, 1, positions, positions]"""


def keep_apart(documents: Tensor, cos: Tensor, sin: Tensor) -> Apart:
    """``cos`` and ``sin`` [longest, half of a head]: the tables by position. Nothing here waits for the device."""
    places = positions(documents)
    return Apart(cos[places], sin[places], _bias(documents, _score_dtype(cos)))


def positions(documents: Tensor) -> Tensor:
    """Of each token within its document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def counted(documents: Tensor) -> Tensor:
    """``documents`` of [batch, positions + 1] tokens: which of the targets continue the document of their input."""
    return (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)


def _bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Padding sees padding: a row of scores without any would be no distribution."""
    places = torch.arange(documents.shape[1], device=documents.device)
    sees = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (places.unsqueeze(1) >= places)
    return torch.zeros((), dtype=dtype, device=documents.device).where(sees, float("-inf")).unsqueeze(1)


def _score_dtype(table: Tensor) -> torch.dtype:
    device = table.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else table.dtype

"""How well do scores rank clicks before the rest? The area under the ROC curve.

Exact over all samples, by ranks: the probability that a click scores higher than a sample without one, where equal
scores count half. A mean of the AUCs of batches would be another number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roc_auc(scores: Tensor, clicks: Tensor) -> float:
    """NaN if all samples or none are clicks. Sync point."""
    is_click = clicks > 0.5
    num_clicks = int(is_click.sum())
    num_others = len(scores) - num_clicks
    if not num_clicks or not num_others or bool(scores.isnan().any()):
        return math.nan
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks = last.double() - (counts.double() - 1) / 2  # counted from 1; the mean where scores are equal
    above = ranks[places][is_click].sum().item() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * num_others))


def log_loss(probabilities: Tensor, clicks: Tensor) -> float:
    """The mean of -log p, where p is the probability given to what happened."""
    tiny = torch.finfo(torch.float32).eps
    p = probabilities.clamp(tiny, 1 - tiny)
    return float(-torch.where(clicks > 0.5, p, 1 - p).log().mean())

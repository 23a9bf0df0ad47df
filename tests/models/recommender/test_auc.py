"""The AUC against scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from closeranks.models.recommender.auc import log_loss, roc_auc


@pytest.mark.parametrize("levels", [2, 7, 10**9], ids=["mostly ties", "many ties", "no ties"])
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_it_is_scikit_learns(levels: int, share: float) -> None:
    generator = torch.Generator().manual_seed(levels)
    clicks = (torch.rand(2000, generator=generator) < share).double()
    scores = ((torch.rand(2000, generator=generator) + 0.3 * clicks) * levels).floor().double()
    assert roc_auc(scores, clicks) == pytest.approx(roc_auc_score(clicks, scores), abs=1e-12)


def test_it_is_no_mean_over_batches() -> None:
    scores = torch.tensor([0.1, 0.2, 0.8, 0.9])
    clicks = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert (roc_auc(scores[:2], clicks[:2]) + roc_auc(scores[2:], clicks[2:])) / 2 == 1.0
    assert roc_auc(scores, clicks) == 0.75


def test_extremes() -> None:
    clicks = torch.tensor([0.0, 0.0, 1.0])
    assert roc_auc(torch.tensor([1.0, 2.0, 3.0]), clicks) == 1.0
    assert roc_auc(torch.tensor([3.0, 2.0, 1.0]), clicks) == 0.0
    assert roc_auc(torch.zeros(3), clicks) == 0.5
    assert math.isnan(roc_auc(torch.zeros(3), torch.ones(3)))
    assert math.isnan(roc_auc(torch.tensor([1.0, math.nan, 2.0]), clicks))


def test_log_loss_is_scikit_learns() -> None:
    clicks = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    probabilities = torch.tensor([0.2, 0.7, 0.4], dtype=torch.float64)
    assert log_loss(probabilities, clicks) == pytest.approx(sklearn_log_loss(clicks, probabilities), rel=1e-12)

"""A module whose parameters get their shape from the first batch is refused before anything is built on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from closeranks.core.errors import ModelError
from closeranks.models.user import UserSpec


def test_lazy_parameters_are_named_with_what_to_do() -> None:
    spec = UserSpec("own:net", lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.LazyBatchNorm1d()), loss=None)
    with pytest.raises(ModelError) as caught:
        spec.build()
    assert str(caught.value) == (
        "in the model own:net, '1.weight' (LazyLinear) and 5 more have no shape yet: a lazy module takes it from its "
        "first input. Name the size (nn.Linear(in_features, ...)), or run one dummy batch through the model where it "
        "is made."
    )


def test_a_lazy_module_that_has_seen_a_batch_is_like_any_other() -> None:
    def made() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
        module(torch.zeros(1, 3))
        return module

    assert [tuple(one.shape) for one in UserSpec("own:net", made, loss=None).build().parameters()] == [(4, 3), (4,)]

"""The moving average of weights: its arithmetic, skipped steps, and swapping it with the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from closeranks.optim.ema import WeightAverage, decay_at
from closeranks.optim.optimizer import whole_parameters

TAKEN, SKIPPED = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)


def test_the_decay_grows_from_a_short_memory_to_the_one_that_is_set() -> None:
    assert decay_at(1, 0.99) == pytest.approx(2 / 11)
    assert decay_at(80, 0.9) == 0.9
    assert decay_at(10**6, 0.999) == 0.999


def test_it_is_what_the_formula_says_and_skipped_steps_change_no_bit() -> None:
    module = nn.Linear(3, 2, dtype=torch.float64)
    average = WeightAverage(whole_parameters(module), 0.6)
    expected = module.weight.detach().clone()
    for step, taken in enumerate((TAKEN, TAKEN, SKIPPED, TAKEN), start=1):
        with torch.no_grad():
            module.weight.add_(torch.randn(2, 3, dtype=torch.float64))
        before = average.tensors[0].clone()
        average.update(step, taken)
        if taken is SKIPPED:
            assert torch.equal(average.tensors[0], before)
        else:
            decay = decay_at(step, 0.6)
            expected = decay * expected + (1 - decay) * module.weight.detach()
    torch.testing.assert_close(average.tensors[0], expected, rtol=1e-14, atol=0)
    assert not torch.equal(average.tensors[0], module.weight)


def test_swapping_twice_leaves_every_bit_as_it_was() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(whole_parameters(module), 0.5)
    with torch.no_grad():
        module.weight.mul_(3.0)
    weights, averaged = module.weight.detach().clone(), average.tensors[0].clone()
    average.swap()
    assert torch.equal(module.weight, averaged)
    assert torch.equal(average.tensors[0], weights)
    average.swap()
    assert torch.equal(module.weight, weights)
    assert torch.equal(average.tensors[0], averaged)

"""Random streams of units: keyed by micro-batch and number, and put back afterwards."""

from __future__ import annotations

import torch

from closeranks.core.seeds import derive_seed
from closeranks.models.unit_rng import seed_unit, unit_rng


def test_a_unit_draws_by_its_number_whatever_ran_before() -> None:
    def drawn(numbers: list[int]) -> dict[int, float]:
        torch.manual_seed(5)
        found = {}
        for number in numbers:
            with unit_rng(number):
                found[number] = torch.rand(()).item()
        return found

    everything, some = drawn([0, 1, 2, 3]), drawn([2, 3])
    assert len(set(everything.values())) == 4
    assert some == {2: everything[2], 3: everything[3]}


def test_the_micro_batchs_seed_is_put_back() -> None:
    torch.manual_seed(5)
    with unit_rng(3):
        assert torch.initial_seed() == derive_seed(5, "unit", 3)
    assert torch.initial_seed() == 5


def test_entering_is_one_way() -> None:
    seed_unit(5, 1)
    first = torch.rand(())
    torch.manual_seed(5)
    with unit_rng(1):
        assert torch.equal(torch.rand(()), first)

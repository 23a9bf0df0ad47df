"""The rules for rows against a loop over single rows, written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from closeranks.core.errors import UserError
from closeranks.optim.row_rules import ROW_RULES, RowAdagrad, RowAdam


def gradients(steps: int, rows: int, dim: int = 3) -> Tensor:
    return torch.randn(steps, rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_adagrad() -> None:
    rule = RowAdagrad(eps=1e-3)
    rows = torch.ones(2, 3, dtype=torch.float64)
    state = rule.init_state(rows)
    total, expected = [0.0, 0.0], [[1.0] * 3, [1.0] * 3]
    for drawn in gradients(4, 2):
        rows, state = rule.update(rows, state, drawn, lr=0.1)
        for row in range(2):
            total[row] += sum(float(value) ** 2 for value in drawn[row]) / 3
            for column in range(3):
                expected[row][column] -= 0.1 * float(drawn[row, column]) / (math.sqrt(total[row]) + 1e-3)
    assert torch.allclose(rows, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)
    assert state["sum"].tolist() == pytest.approx(total, rel=1e-12)


def test_adam() -> None:
    rule = RowAdam(betas=(0.8, 0.9), eps=1e-3)
    rows = torch.ones(1, 3, dtype=torch.float64)
    state = rule.init_state(rows)
    mean, square, expected = [0.0] * 3, 0.0, [1.0] * 3
    for step, drawn in enumerate(gradients(4, 1), start=1):
        rows, state = rule.update(rows, state, drawn, lr=0.1)
        square = 0.9 * square + 0.1 * sum(float(value) ** 2 for value in drawn[0]) / 3
        for column in range(3):
            mean[column] = 0.8 * mean[column] + 0.2 * float(drawn[0, column])
            root = math.sqrt(square / (1 - 0.9**step)) + 1e-3
            expected[column] -= 0.1 * mean[column] / (1 - 0.8**step) / root
    assert torch.allclose(rows[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12)
    assert state["step"].tolist() == [4]


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Bit for bit: a server may hold any of the rows."""
    rule = ROW_RULES[name]()
    rows = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    drawn = torch.randn(300, 16, generator=torch.Generator().manual_seed(2))
    whole, state = rule.update(rows, rule.init_state(rows), drawn, lr=0.1)
    for some in ([7], [3, 299, 11], list(range(0, 300, 7))):
        part, own = rule.update(rows[some], rule.init_state(rows[some]), drawn[some], lr=0.1)
        assert torch.equal(part, whole[some])
        assert all(torch.equal(own[key], state[key][some]) for key in state)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_what_was_given_stays_as_it_was(name: str) -> None:
    rule = ROW_RULES[name]()
    rows, drawn = torch.ones(2, 3), torch.ones(2, 3)
    state = rule.init_state(rows)
    rule.update(rows, state, drawn, lr=0.1)
    assert torch.equal(rows, torch.ones(2, 3))
    assert not any(tensor.any() for tensor in state.values())


def test_state_is_small() -> None:
    """One value a row for Adagrad: a table of width 64 needs 1/64 more, where Adagrad by value needs as much again."""
    rows = torch.zeros(10, 64)
    assert sum(tensor.numel() for tensor in RowAdagrad().init_state(rows).values()) == 10
    assert sum(tensor.numel() for tensor in RowAdam().init_state(rows).values()) == 10 * 66


def test_an_unknown_rule_is_told() -> None:
    with pytest.raises(UserError, match="adagrad"):
        ROW_RULES["adagrd"]

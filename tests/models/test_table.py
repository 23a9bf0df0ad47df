"""A table of its own rows and one whose rows are kept elsewhere: the same vectors, one gradient a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import RowRule, RowSource
from closeranks.core.table_rows import initial_rows, row_key
from closeranks.models.local_rows import LocalRows
from closeranks.models.table import Table, hash_ids, row_bound
from closeranks.optim.row_rules import RowAdagrad, RowAdam

BAGS = torch.tensor([[3, 9, -1], [3, 3, 3], [-1, -1, -1], [0, 9, 4]])


class Recorded(LocalRows):
    """Local rows that keep what they were asked for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.pulls: list[list[int]] = []
        self.pushes: list[tuple[list[int], Tensor]] = []

    def pull(self, ids: Tensor) -> Tensor:
        self.pulls.append(ids.tolist())
        return super().pull(ids)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        self.pushes.append((ids.tolist(), gradients.clone()))
        super().push(ids, gradients)


def both(rule: RowRule | None = None, dtype: torch.dtype = torch.float64) -> tuple[Table, Table, Recorded]:
    """The same table twice: with a parameter, and with rows that are born at first use."""
    torch.manual_seed(11)
    rows = Recorded(row_key(torch.initial_seed(), "t"), 4, rule or RowAdagrad(), dtype)
    return Table("t", 10, 4, "sum").to(dtype), Table("t", 10, 4, "sum", source=rows), rows


def test_bags_are_sums_and_no_id_adds_nothing() -> None:
    table, _, _ = both()
    assert table.weight is not None
    expected = [table.weight[3] + table.weight[9], 3 * table.weight[3], torch.zeros(4), table.weight[[0, 9, 4]].sum(0)]
    assert torch.allclose(table(BAGS), torch.stack([row.double() for row in expected]))
    table.bag = "none"
    assert table(BAGS).shape == (4, 3, 4)
    assert torch.equal(table(BAGS)[0, 1], table.weight[9])


def test_rows_kept_elsewhere_give_the_same_vectors_and_gradients() -> None:
    table, sparse, rows = both()
    assert isinstance(rows, RowSource)
    assert not list(sparse.parameters())
    weights = torch.randn(4, 4, dtype=torch.float64)
    for one in (table, sparse):
        (one(BAGS).square() * weights).sum().backward()
    assert torch.equal(sparse(BAGS), table(BAGS))
    ((ids, gradients),) = rows.pushes
    assert ids == [0, 3, 4, 9], "each row once, sorted"
    assert table.weight is not None
    assert table.weight.grad is not None
    assert torch.allclose(gradients, table.weight.grad[ids], rtol=1e-12)
    others = [row for row in range(10) if row not in ids]
    assert not table.weight.grad[others].any()


def test_each_micro_batch_pulls_each_row_once() -> None:
    _, sparse, rows = both()
    sparse(torch.tensor([[5, 5], [5, 2]])).sum().backward()
    sparse(torch.tensor([[2, -1]])).sum().backward()
    assert rows.pulls == [[2, 5], [2]]
    assert [ids for ids, _ in rows.pushes] == [[2, 5], [2]]


def test_without_gradients_nothing_is_pushed() -> None:
    _, sparse, rows = both()
    with torch.no_grad():
        sparse(BAGS)
    assert rows.pulls
    assert not rows.pushes


def test_rows_are_born_at_first_use_with_the_value_they_have_anywhere() -> None:
    table, sparse, rows = both(dtype=torch.float32)
    assert rows.ids.tolist() == []
    late_first = sparse(torch.tensor([[7]]))
    sparse(torch.tensor([[1]]))
    assert rows.ids.tolist() == [1, 7]
    assert table.weight is not None
    assert torch.equal(late_first[0], table.weight[7])
    key = row_key(torch.initial_seed(), "t")
    assert np.array_equal(table.weight.detach().numpy(), initial_rows(key, np.arange(10), 4, row_bound(4)))


@pytest.mark.parametrize("rule", [RowAdagrad(), RowAdam()])
def test_training_rows_is_training_the_whole_table_by_the_same_rule(rule: RowRule) -> None:
    """Against a dense table whose every row has state, and is updated where it had a gradient."""
    table, sparse, rows = both(rule)
    assert table.weight is not None
    state = rule.init_state(table.weight.detach())
    for step in range(5):
        ids = torch.randint(-1, 10, (6, 2), generator=torch.Generator().manual_seed(step))
        for one in (table, sparse):
            for half in ids.split(3):
                one(half).sin().sum().backward()
        touched = torch.unique(ids[ids >= 0])
        assert table.weight.grad is not None
        before = {name: tensor[touched] for name, tensor in state.items()}
        updated, after = rule.update(table.weight.detach()[touched], before, table.weight.grad[touched] * 0.5, lr=0.1)
        with torch.no_grad():
            table.weight[touched] = updated
        for name, tensor in after.items():
            state[name][touched] = tensor
        table.weight.grad = None
        rows.step(0.1, scale=0.5)
    assert torch.allclose(rows.pull(rows.ids), table.weight[rows.ids], rtol=1e-12, atol=1e-15)
    assert not torch.equal(table.weight, both()[0].weight)


def test_a_step_that_is_not_taken_changes_nothing() -> None:
    _, sparse, rows = both()
    before = sparse(BAGS).detach()
    sparse(BAGS).sum().backward()
    rows.discard()
    rows.step(0.1)
    assert torch.equal(sparse(BAGS), before)


def test_hashed_ids_may_have_any_size() -> None:
    torch.manual_seed(0)
    table = Table("t", 7, 3, hashed=True)
    ids = torch.tensor([[2**62, 5], [10**12, -1]])
    found = table(ids)
    assert torch.equal(found, table(ids))
    assert not found[1, 1].any()
    counts = torch.bincount(hash_ids(torch.arange(70_000) * 4096, 7), minlength=7)
    assert counts.min() > 9_500, "ids that share their low bits are spread, too"


def test_a_source_of_another_width_is_refused() -> None:
    with pytest.raises(ModelError, match="table 't' have 3 values where they are kept, and 4 in the model"):
        Table("t", 10, 4, source=LocalRows(0, 3, RowAdagrad()))

"""The rows that a rank keeps: found again among many, born at their first update, listed in blocks that do not move."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.core.table_rows import ID_BITS, row_key, row_owners
from closeranks.models.local_rows import LocalRows
from closeranks.models.table import row_bound
from closeranks.optim.row_rules import RowAdagrad, RowAdam
from closeranks.sync.rows.row_index import ABSENT, RowIndex
from closeranks.sync.rows.row_store import BLOCK_ROWS, KEYS, ROWS, RowGradients, RowStore, added
from closeranks.sync.rows.table_rows import TableEntry, TableList, merged

KEY = row_key(7, "t")


def tables(*names: str, dim: int = 4) -> TableList:
    found = TableList()
    for name in names:
        found.add(name, 10**9, dim, row_key(7, name), row_bound(dim))
    return found


def store(rule: Any = None, dtype: torch.dtype = torch.float64) -> RowStore:
    found = tables("t")
    return RowStore(4, dtype, rule or RowAdagrad(), lambda keys: found.first_rows(keys, dtype))


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 200), unique=True, max_size=40), max_size=12))
def test_an_index_finds_what_a_dict_finds(batches: list[list[int]]) -> None:
    index, known = RowIndex(), dict[int, int]()
    for batch in batches:
        fresh = [key for key in batch if key not in known]
        index.add(np.array(fresh, np.int64))
        known |= {key: len(known) + number for number, key in enumerate(fresh)}
        asked = np.arange(-1, 202)
        assert index.find(asked).tolist() == [known.get(key, ABSENT) for key in asked.tolist()]
    assert len(index) == len(known)


def test_an_index_of_many_keys_is_merged_and_finds_all() -> None:
    index = RowIndex()
    keys = np.random.default_rng(0).permutation(100_000)
    for part in np.array_split(keys, 23):
        index.add(part)
    assert index.find(keys).tolist() == list(range(len(keys)))
    assert len(index._short.keys) < len(index._long.keys), "the control: they are in two runs"


@pytest.mark.parametrize("rule", [RowAdagrad(), RowAdam()])
def test_a_store_updates_rows_as_local_rows_do(rule: Any) -> None:
    kept, local = store(rule), LocalRows(KEY, 4, rule, torch.float64)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        ids = torch.unique(torch.randint(0, 50, (20,), generator=generator))
        gradients = torch.randn(len(ids), 4, dtype=torch.float64, generator=generator)
        assert torch.equal(kept.read(ids), local.pull(ids))
        local.push(ids, gradients)
        local.step(0.1)
        kept.update(RowGradients(ids, gradients), 0.1)
    assert torch.equal(kept.read(local.ids), local.pull(local.ids))
    assert not torch.equal(kept.read(local.ids), store(rule).read(local.ids))


def test_reading_stores_nothing() -> None:
    kept = store()
    first = kept.read(torch.tensor([3, 10**8]))
    assert kept.num_rows == 0
    kept.update(RowGradients(torch.tensor([10**8]), torch.ones(1, 4, dtype=torch.float64)), 0.1)
    assert kept.num_rows == 1
    after = kept.read(torch.tensor([3, 10**8]))
    assert torch.equal(after[0], first[0])
    assert not torch.equal(after[1], first[1])


def test_a_block_whose_rows_are_not_touched_keeps_its_bytes_and_its_name() -> None:
    kept = store(dtype=torch.float32)
    ids = torch.arange(2 * BLOCK_ROWS + 100)
    for part in ids.split(5000):
        kept.update(RowGradients(part, torch.ones(len(part), 4)), 0.1)
    before = [{name: tensor.clone() for name, tensor in block.items()} for block in kept.blocks()]
    assert [len(block[KEYS]) for block in before] == [BLOCK_ROWS, BLOCK_ROWS, 100]
    late = torch.tensor([5, 2 * BLOCK_ROWS + 500])
    kept.update(RowGradients(late, torch.ones(2, 4)), 0.1)
    same = [
        all(torch.equal(old[name], tensor) for name, tensor in new.items())
        for old, new in zip(before, kept.blocks(), strict=True)
    ]
    assert same == [False, True, False]


def test_rows_of_all_columns_come_back_into_another_store() -> None:
    kept, other = store(RowAdam()), store(RowAdam())
    kept.update(RowGradients(torch.tensor([4, 9]), torch.ones(2, 4, dtype=torch.float64)), 0.1)
    for block in kept.blocks():
        other.append(block)
    for each in (kept, other):
        each.update(RowGradients(torch.tensor([4, 5]), torch.ones(2, 4, dtype=torch.float64)), 0.1)
    for one, two in zip(kept.blocks(), other.blocks(), strict=True):
        assert one.keys() == {KEYS, ROWS, "exp_avg", "exp_avg_sq", "step"}
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def parts_of(*numbers: float) -> list[RowGradients]:
    return [RowGradients(torch.tensor([1, 2 + at]), torch.full((2, 4), one)) for at, one in enumerate(numbers)]


def test_gradients_are_added_in_the_order_of_their_parts() -> None:
    like, numbers = store(dtype=torch.float32), (1e8, 1.0, -1e8)
    keys, total = added(parts_of(*numbers), like)
    assert keys.tolist() == [1, 2, 3, 4]
    assert total[0].tolist() == [0.0] * 4, "1e8 + 1 is 1e8"
    assert added(parts_of(1e8, -1e8, 1.0), like).values[0].tolist() == [1.0] * 4
    assert len(added([], like).keys) == 0


def test_a_table_that_is_read_twice_has_each_row_once() -> None:
    one, two = tables("a", "b").tables
    keys, values = merged([one, one], [torch.tensor([1, 2]), torch.tensor([2, 3])], [torch.ones(2, 4)] * 2)
    assert keys.tolist() == [1, 2, 3]
    assert values[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert len(merged([one, two], [keys, keys], [values, values])[0]) == 6


def test_rows_of_several_tables_have_the_first_values_of_their_own() -> None:
    both = tables("a", "b")
    keys = torch.tensor([5, (1 << ID_BITS) + 5])
    found = both.first_rows(keys, torch.float32)
    alone = [LocalRows(row_key(7, name), 4, RowAdagrad()).pull(torch.tensor([5])) for name in ("a", "b")]
    assert torch.equal(found, torch.cat(alone))
    assert not torch.equal(found[0], found[1])


def test_owners_are_loaded_equally() -> None:
    keys = np.concatenate([np.arange(30_000) * 64, (3 << ID_BITS) + np.arange(30_000)])
    counts = np.bincount(row_owners(keys, 7), minlength=7)
    assert counts.min() > 0.95 * len(keys) / 7
    assert row_owners(keys[:5], 1).tolist() == [0] * 5


def test_a_module_is_copied_with_the_tables_it_reads() -> None:
    source = tables("a").sources[0]
    assert copy.deepcopy(source) is source
    assert source.table == TableEntry(0, "a", 4, row_key(7, "a"), row_bound(4))

"""The first values of a table's rows: the same wherever a row is born."""

from __future__ import annotations

import numpy as np

from closeranks.core.table_rows import initial_rows, row_key


def test_a_row_is_the_same_alone_and_among_others() -> None:
    key = row_key(3, "tables.0")
    whole = initial_rows(key, np.arange(400), 5, 0.1)
    some = np.array([399, 7, 7, 123])
    assert np.array_equal(initial_rows(key, some, 5, 0.1), whole[some])
    assert np.array_equal(initial_rows(key, np.array([2**62]), 5, 0.1), initial_rows(key, np.array([2**62]), 5, 0.1))


def test_chunks_leave_no_trace() -> None:
    """More values than are drawn at once."""
    key = row_key(0, "t")
    whole = initial_rows(key, np.arange(3), 600_000, 1.0)
    assert np.array_equal(whole[2:], initial_rows(key, np.array([2]), 600_000, 1.0))


def test_tables_and_seeds_differ() -> None:
    keys = [row_key(seed, table) for seed in (0, 1) for table in ("a", "b")]
    rows = [initial_rows(key, np.arange(9), 4, 1.0).tobytes() for key in keys]
    assert len(set(rows)) == 4


def test_values_are_uniform_within_the_bound() -> None:
    rows = initial_rows(row_key(0, "t"), np.arange(20_000), 4, 0.5)
    assert rows.dtype == np.float32
    assert 0.499 < np.abs(rows).max() <= 0.5
    assert abs(rows.mean()) < 0.005
    assert abs(rows.std() - 0.5 / 3**0.5) < 0.005

"""The rows of embedding tables before anybody has trained them: their keys, their owners, their first values.

Invariant: the first value is a pure function of (seed, name of the table, id of the row), so a row that is born at its
first use has the same bits on every worker and server, and whether or not any other row exists.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.counter_hash import uniform, words
from closeranks.core.seeds import derive_seed

Rows: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

ID_BITS = 48
"""Of a key: the id of the row; the bits above them are the number of its table."""

_CHUNK = 1 << 20
"""Values that are drawn at once: a table of any size is filled in a few megabytes of scratch."""


def row_key(seed: int, table: str) -> int:
    """The key of a table's rows in a run with this seed; the built-in models draw their tables with it, too."""
    return derive_seed(seed, "init", f"{table}.weight")


def row_owners(keys: Ints, num_owners: int) -> Ints:
    """By key: which of the owners keeps the row. A hash, so that owners are loaded equally whatever the ids are."""
    return (words(0, keys) % np.uint64(num_owners)).astype(np.int64)


def initial_rows(key: int, ids: Ints, dim: int, bound: float) -> Rows:
    """Rows [ids, dim], uniform between ``-bound`` and ``bound``. About 30 ns a value."""
    columns = np.arange(dim)
    rows = np.empty((len(ids), dim), dtype=np.float32)
    step = max(1, _CHUNK // max(dim, 1))
    for first in range(0, len(ids), step):
        drawn = uniform(words(key, ids[first : first + step, None], columns))
        rows[first : first + step] = (2.0 * drawn - 1.0) * bound
    return rows

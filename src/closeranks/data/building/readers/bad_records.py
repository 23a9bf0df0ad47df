"""How are records read when some of them may be bad?

Invariant: every record that can be read is; one that cannot is named by its reason. Whatever is not a record's own
fault is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from closeranks.core.errors import BadRecordError
from closeranks.data.dataset_protocol import Record, Records


def read_with_errors(store: Records, first: int, last: int) -> Iterator[tuple[Record | None, str]]:
    """Each record, or why it cannot be read. All at once; where one is bad, one by one, so that the others are read."""
    try:
        yield from [(record, "") for record in store.read(np.arange(first, last, dtype=np.int64))]
        return
    except BadRecordError as error:
        if last - first == 1:
            yield None, error.what
            return
    for index in range(first, last):
        yield from read_with_errors(store, index, index + 1)

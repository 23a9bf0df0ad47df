"""Reads records of which some may be bad.

Invariant: every readable record is returned, and every bad one is reported with its reason. Errors that are not those
of a single record are raised.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from closeranks.core.errors import BadRecordError
from closeranks.data.dataset_protocol import Record, Records


def read_with_errors(store: Records, first: int, last: int) -> Iterator[tuple[Record | None, str]]:
    """Each record, or why it cannot be read. Reads all at once; if one is bad, one by one, so that the others are
    read."""
    try:
        yield from [(record, "") for record in store.read(np.arange(first, last, dtype=np.int64))]
        return
    except BadRecordError as error:
        if last - first == 1:
            yield None, error.what
            return
    for index in range(first, last):
        yield from read_with_errors(store, index, index + 1)

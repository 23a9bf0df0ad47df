"""The interface that the loader expects of a source, beyond reading samples.

Any source can be loaded (``core.protocols.DataSource``); stored ones also know which samples are stored together and
where each one is, and prefetch what will be read next. ``as_loader_source`` gives other sources default answers, so
that callers need not distinguish them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from closeranks.core.protocols import Batch, DataSource
from closeranks.data.dataset_protocol import Ints


@runtime_checkable
class LoaderSource(DataSource, Protocol):
    """A source of stored samples. ``read`` raises ``BadRecordError`` if a single sample is bad, and any other error if
    the data as a whole cannot be read (a missing file, a lost connection)."""

    block: int
    """Number of samples that are stored together; 0 if all orders cost the same."""

    def where(self, index: int) -> str:
        """Location of a sample, for people; empty if there is none."""
        ...

    def prefetch(self, indices: Ints) -> None:
        """These will be read soon, in this order: begin to fetch what is remote. Returns at once."""
        ...

    def close(self) -> None:
        """Release files and stop fetching; ``read`` opens them again."""
        ...


class PlainSource:
    """A source without locations: what a user passes in."""

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self.identity = source.identity
        self.block = 0

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Ints) -> Batch:
        return self._source.read(indices)

    def where(self, index: int) -> str:
        return ""

    def prefetch(self, indices: Ints) -> None:
        return None

    def close(self) -> None:
        return None


def as_loader_source(source: DataSource) -> LoaderSource:
    return source if isinstance(source, LoaderSource) else PlainSource(source)

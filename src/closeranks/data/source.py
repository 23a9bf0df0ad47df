"""What does the loader ask of a source beyond its samples?

Any source will do (``core.protocols.Source``); stored ones also say what lies together, where a sample lies and take
word of what will be read next. ``placed`` gives the others plain answers, so that nobody asks which kind it is.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from closeranks.core.protocols import Batch, DataSource
from closeranks.data.dataset_protocol import Ints


@runtime_checkable
class LoaderSource(DataSource, Protocol):
    """Samples that lie somewhere. ``read`` raises ``BadRecordError`` when a sample itself is at fault, and any other
    error when the data as a whole cannot be read (a missing file, a lost connection)."""

    block: int
    """Samples that lie together; 0 where any order costs the same."""

    def where(self, index: int) -> str:
        """Where a sample lies, for people; empty where there is nothing to say."""
        ...

    def prefetch(self, indices: Ints) -> None:
        """These will be read soon, in this order: begin to fetch what lies far away. Returns at once."""
        ...

    def close(self) -> None:
        """Give back files and stop fetching; ``read`` opens again."""
        ...


class PlainSource:
    """A source with nothing to say of places: what a user hands over."""

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

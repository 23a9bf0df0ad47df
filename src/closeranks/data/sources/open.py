"""Opens the source that a job's ``[data]`` table describes.

Invariant: opening never depends on the rank; every rank opens the same source.
"""

from __future__ import annotations

from typing import Literal, overload

from closeranks.core.protocols import DataSource
from closeranks.data.config import DataConfig
from closeranks.data.sources import (  # noqa: F401  each registers its kind
    clicks,
    digits,
    mixture,
    pairs,
    records,
    text,
    tokens,
    user,
)
from closeranks.data.sources.registry import Split, opener_of


@overload
def open_source(config: DataConfig, split: Literal["train"], seed: int) -> DataSource: ...


@overload
def open_source(config: DataConfig, split: Literal["eval"], seed: int) -> DataSource | None: ...


def open_source(config: DataConfig, split: Split, seed: int) -> DataSource | None:
    """The training or the evaluation part of the data; None if the job holds out nothing for evaluation."""
    return opener_of(config.name)(config, split, seed)

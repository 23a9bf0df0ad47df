"""Which source does a job's ``[data]`` table ask for?

Invariant: opening never depends on ranks; every rank opens the same source.
"""

from __future__ import annotations

from typing import Literal, overload

from closeranks.core.protocols import Source
from closeranks.data.config import DataConfig
from closeranks.data.sources import digits, pairs, text, user  # noqa: F401  each registers its kind
from closeranks.data.sources.registry import SOURCES, Split


@overload
def open_source(config: DataConfig, split: Literal["train"], seed: int) -> Source: ...


@overload
def open_source(config: DataConfig, split: Literal["eval"], seed: int) -> Source | None: ...


def open_source(config: DataConfig, split: Split, seed: int) -> Source | None:
    """The training or the evaluation part of the data; None where the job keeps nothing for evaluation."""
    kind = "user" if ":" in config.name else config.name
    return SOURCES[kind](config, split, seed)

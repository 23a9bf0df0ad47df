"""Derives the sample order of a job from its ``[data]`` table, its source and its seed.

No other place does that. Invariant: the order is determined by those alone; a part of a mixture keeps its order when
other parts are added, removed or reweighted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from closeranks.core.seeds import derive_seed
from closeranks.data.config import DataConfig, MixtureConfig
from closeranks.data.sampling.mixture_order import MixtureOrder
from closeranks.data.sampling.order import BlockOrder, FullOrder, SampleOrder, SequentialOrder

_BLOCK = 1024


class BlockedSource(Protocol):
    """What an order must know about a source."""

    @property
    def block(self) -> int:
        """Number of samples that are stored together; 0 if all orders cost the same."""
        ...

    def __len__(self) -> int: ...


class _Mixed(BlockedSource, Protocol):
    """The source of a mixture."""

    @property
    def parts(self) -> Sequence[BlockedSource]: ...


def order_of(config: DataConfig, source: BlockedSource, seed: int) -> SampleOrder:
    """The order of a run. In a mixture, the shuffle settings of ``[data]`` apply to each part, with its own blocks."""
    if not isinstance(config, MixtureConfig):
        return _single(config, source, seed)
    named = zip(config.parts, cast(_Mixed, source).parts, strict=True)
    orders = tuple(_single(config, part, derive_seed(seed, "part", name)) for name, part in named)
    return MixtureOrder(orders, tuple(part.weight for part in config.parts.values()))


def _single(config: DataConfig, source: BlockedSource, seed: int) -> SampleOrder:
    if config.shuffle == "none":
        return SequentialOrder(len(source))
    if config.shuffle == "blocks":
        block = config.shuffle_block or source.block or _BLOCK
        return BlockOrder(len(source), seed, block, config.shuffle_window)
    return FullOrder(len(source), seed)


@dataclass(frozen=True, slots=True)
class OrderChange:
    """The difference between the orders of two runs, for people."""

    name: str
    keys: str
    """The job's settings that determine it."""
    saved: str = ""
    here: str = ""
    """Both empty if the difference is not that of one setting."""


def order_change(saved: str, here: str) -> OrderChange:
    """The difference of two unequal orders, given by their ``SampleOrder.signature``."""
    one, other = _shuffle_of(saved), _shuffle_of(here)
    if MixtureOrder.__name__ in (one, other):
        return OrderChange("mixture", "data.parts, their weights and data.shuffle")
    if one != other:
        return OrderChange("data.shuffle", "data.shuffle", f"'{one}'", f"'{other}'")
    for field, key in (("block", "data.shuffle_block"), ("window", "data.shuffle_window")):
        values = [re.findall(rf"\b{field}=(\d+)", text) for text in (saved, here)]
        if values[0] != values[1] and all(values):
            return OrderChange(key, key, values[0][0], values[1][0])
    return OrderChange("order of the data", "the shuffling options of [data]")


def _shuffle_of(described: str) -> str:
    """The value of ``data.shuffle`` that makes such an order; for a mixture, the name of its order."""
    name = described.partition("(")[0]
    names = {"": "full", SequentialOrder.__name__: "none", BlockOrder.__name__: "blocks"}
    return names.get(name, name)

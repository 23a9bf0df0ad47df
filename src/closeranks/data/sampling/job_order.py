"""In which order does a job go through its data?

The one place where the table ``[data]``, the source and the seed become an order. Invariant: it follows from those
alone; a part of a mixture keeps its order when other parts come, go or change their weights.
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
    """What an order must know of a source."""

    @property
    def block(self) -> int:
        """Samples that lie together; 0 where any order costs the same."""
        ...

    def __len__(self) -> int: ...


class _Mixed(BlockedSource, Protocol):
    """The source of a mixture."""

    @property
    def parts(self) -> Sequence[BlockedSource]: ...


def order_of(config: DataConfig, source: BlockedSource, seed: int) -> SampleOrder:
    """The order of a run. In a mixture, what ``[data]`` says of shuffling goes for each part, with its own blocks."""
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
    """What differs between the orders of two runs, for people."""

    name: str
    keys: str
    """Of the job, where it is said."""
    saved: str = ""
    here: str = ""
    """Both empty where the difference is more than a word."""


def order_change(saved: str, here: str) -> OrderChange:
    """Of two orders that are not the same, as ``Order.signature`` gives them."""
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
    """What ``data.shuffle`` makes such an order; a mixture stands for itself."""
    name = described.partition("(")[0]
    names = {"": "full", SequentialOrder.__name__: "none", BlockOrder.__name__: "blocks"}
    return names.get(name, name)

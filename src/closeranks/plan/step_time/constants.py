"""Which constants do the step-time models use? Those of ``constants.toml``, frozen before they were tested.

Invariant: each constant is one physical property of hardware or software; nothing is fitted per model or per source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.registry import did_you_mean
from closeranks.facts.timing.attention import AttentionModel
from closeranks.facts.timing.memory_bound import MemoryModel
from closeranks.facts.timing.products import ProductModel


@dataclass(frozen=True, slots=True)
class OverlapModel:
    hidden: float = 0.9
    """Share of the time of a computation behind which communication can hide."""
    slowdown: float = 0.1
    """By how much of its own time hidden communication slows the computation: it takes memory bandwidth and units."""


@dataclass(frozen=True, slots=True)
class ExpertModel:
    efficiency: float = 1.0
    """Speed of the products of routed experts relative to evenly filled ones: some experts get more tokens."""
    layer_s: float = 0.0
    """Fixed time of routing in one block and direction: sorting, and waiting for the sizes of what is sent."""


@dataclass(frozen=True, slots=True)
class Software:
    """How a family of training software runs a step."""

    gradient_bytes: int
    """Of one element, in the reduction over the data ranks."""
    weight_bytes: int
    """Of one element, in the gather after the optimizer of ZeRO 1 and 2."""
    gathered_bytes: int
    """Of one element, in the gathers of ZeRO 3."""
    overlaps_data: bool
    overlaps_tensor: float
    """Share of the communication on the tensor axis that runs beside the products it feeds."""
    gathers_over_one_card: bool
    """Whether the gathers of ZeRO 3 leave a host over one network card for each rank's ring, instead of all cards."""
    attention: float
    """Speed of its fused attention relative to the fastest kernels of the device."""
    balances_stages: bool
    """Whether stages are cut by cost; else every stage has as many blocks."""
    stops_recompute: bool
    """Whether a second forward ends before its last product, whose result nothing reads."""
    eager_passes: float
    """Bytes that memory-bound operations move when nothing is compiled, relative to what the models count."""
    host_block_s: float
    """Time in which the host launches the forward of one block."""
    host_block_compiled_s: float
    step_s: float
    """Fixed time of a step."""
    micro_s: float
    """Fixed time of a micro-batch."""
    compressed_bytes: float = 0.0
    """Of one element of compressed gradients, where they are compressed (docs/sync.md); 0: nothing is."""


@dataclass(frozen=True, slots=True)
class Constants:
    products: ProductModel
    attention: AttentionModel
    memory: MemoryModel
    overlap: OverlapModel
    experts: ExpertModel
    software: Mapping[str, Software]

    def of(self, software: str) -> Software:
        if software not in self.software:
            fix = did_you_mean(software, self.software)
            raise ConfigError([Problem("software", f"there is no profile of the software '{software}'", fix)])
        return self.software[software]


@cache
def frozen_constants() -> Constants:
    return parse_constants(_values())


@cache
def constants_before_look() -> Constants:
    """The frozen constants without those that were set after errors of held-out rows had been seen."""
    values = _values()
    software = {name: {**entry, **values["before_look"].get(name, {})} for name, entry in values["software"].items()}
    return parse_constants({**values, "software": software})


def _values() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text("utf-8"))


def parse_constants(values: Mapping[str, Any]) -> Constants:
    return Constants(
        ProductModel(**values["products"]),
        AttentionModel(**values["attention"]),
        MemoryModel(**values["memory"]),
        OverlapModel(**values["overlap"]),
        ExpertModel(**values["experts"]),
        {name: Software(**entry) for name, entry in values["software"].items()},
    )

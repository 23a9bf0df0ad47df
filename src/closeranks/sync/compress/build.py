"""Builds the compressor that a job's configuration asks for.

A codec of a few lines is one entry of ``CODECS``; what is no codec (PowerSGD) is built beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.compressed import Compressed, Plan, Scheme
from closeranks.sync.compress.halves import BFloat16, Float16
from closeranks.sync.compress.int8 import Int8
from closeranks.sync.compress.onebit import OneBit
from closeranks.sync.compress.powersgd import PowerSgd
from closeranks.sync.compress.topk import TopK
from closeranks.sync.compress.two_shot import TwoShot
from closeranks.sync.config import CompressConfig
from closeranks.sync.held import DataGroup
from closeranks.sync.places import Load
from closeranks.sync.ways import WayMaker

CODECS: dict[str, Callable[[CompressConfig], Codec]] = {
    "bf16": lambda config: BFloat16(),
    "fp16": lambda config: Float16(),
    "int8": lambda config: Int8(),
    "topk": lambda config: TopK(config.ratio),
    "onebit": lambda config: OneBit(),
}


def compressed_ways(config: CompressConfig, group: DataGroup, plan: Plan, *, scatters: bool = False) -> WayMaker:
    """``scatters``: whether only slices of the sums are needed (reduce-scatter)."""

    def make(load: Load) -> Compressed:
        scheme: Scheme
        if config.name == "powersgd":
            scheme = PowerSgd(config.rank, group, load, feedback=config.feedback)
        else:
            codec = CODECS[config.name](config)
            scheme = TwoShot(codec, group, load, feedback=config.feedback, scatters=scatters)
        return Compressed(scheme, group, load, plan)

    return make


def words(config: CompressConfig, what: str) -> str:
    """A description of the compression of ``what``, for people."""
    if config.name == "powersgd":
        return f"{what} travel as products of rank {config.rank}"
    return CODECS[config.name](config).words(what)

"""Builds the compressor that a job's configuration asks for.

A codec of a few lines is one entry of ``CODECS``; what is no codec (PowerSGD) is built beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.collectives.reductions import ReductionFactory
from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.compressed_reduction import CompressedReduction, CompressionSchedule, CompressionScheme
from closeranks.sync.compress.half_precision import BFloat16Codec, Float16Codec
from closeranks.sync.compress.int8 import Int8Codec
from closeranks.sync.compress.onebit import OneBitCodec
from closeranks.sync.compress.powersgd import PowerSgd
from closeranks.sync.compress.topk import TopKCodec
from closeranks.sync.compress.two_shot import TwoShot
from closeranks.sync.config import CompressConfig
from closeranks.sync.reducers.local_parameters import CommGroup

CODECS: dict[str, Callable[[CompressConfig], Codec]] = {
    "bf16": lambda config: BFloat16Codec(),
    "fp16": lambda config: Float16Codec(),
    "int8": lambda config: Int8Codec(),
    "topk": lambda config: TopKCodec(config.ratio),
    "onebit": lambda config: OneBitCodec(),
}


def compressed_reductions(
    config: CompressConfig, group: CommGroup, plan: CompressionSchedule, *, scatters: bool = False
) -> ReductionFactory:
    """``scatters``: whether only slices of the sums are needed (reduce-scatter)."""

    def make(spec: FlatBufferSpec) -> CompressedReduction:
        scheme: CompressionScheme
        if config.name == "powersgd":
            scheme = PowerSgd(config.rank, group, spec, feedback=config.feedback)
        else:
            codec = CODECS[config.name](config)
            scheme = TwoShot(codec, group, spec, feedback=config.feedback, scatters=scatters)
        return CompressedReduction(scheme, group, spec, plan)

    return make


def describe_compression(config: CompressConfig, what: str) -> str:
    """A description of the compression of ``what``, for people."""
    if config.name == "powersgd":
        return f"{what} are sent as products of rank {config.rank}"
    return CODECS[config.name](config).describe(what)

"""How fast are gradients coded on a GPU?

Each codec of ``closeranks.sync.compress`` on 256 MiB of float32 values, coded and decoded; and PowerSGD's products for
a layer's worth of matrices. Told in GB of gradients a second, and beside it the rate of a link above which coding takes
longer than it spares: 1 / (1/coding) times what it saves.

    python benchmarks/gpu_codecs.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from results import conclude, say

from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.half_precision import BFloat16Codec, Float16Codec
from closeranks.sync.compress.int8 import Int8Codec
from closeranks.sync.compress.onebit import OneBitCodec
from closeranks.sync.compress.powersgd import orthogonalize
from closeranks.sync.compress.topk import TopKCodec

NUMEL = 1 << 26
GOAL_GB_S = 25.0
"""Twice what a link of 100 Gbit/s carries: coding is then not what a step waits for."""


def seconds(act: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(3):
        act()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    rows = torch.randn(2, NUMEL // 2, device="cuda")
    codecs: dict[str, Codec] = {
        "bf16": BFloat16Codec(),
        "fp16": Float16Codec(),
        "int8": Int8Codec(),
        "onebit": OneBitCodec(),
        "topk": TopKCodec(0.01),
    }
    figures: dict[str, Any] = {}
    for name, codec in codecs.items():
        codes = codec.encode(rows)
        coding = 4e-9 * NUMEL / seconds(lambda codec=codec: codec.encode(rows))
        decoding = 4e-9 * NUMEL / seconds(lambda codec=codec, codes=codes: codec.decode(codes, NUMEL // 2, rows.dtype))
        figures[name] = {"code_gb_s": round(coding, 1), "decode_gb_s": round(decoding, 1)}
        say(f"{name:<9} {figures[name]}")
    figures["powersgd"] = {"code_gb_s": round(powersgd(), 1)}
    say(f"powersgd  {figures['powersgd']}")
    slowest = min(one["code_gb_s"] for name, one in figures.items() if name != "topk")
    conclude("gpu_codecs", figures, f"all but topk code at least {GOAL_GB_S:g} GB/s", slowest >= GOAL_GB_S)


def powersgd() -> float:
    """Both products and what makes columns orthonormal, for sixteen matrices of 2048 x 2048."""
    m, q = torch.randn(16, 2048, 2048, device="cuda"), torch.randn(16, 2048, 4, device="cuda")

    def act() -> torch.Tensor:
        p = orthogonalize(m @ q)
        return p @ (p.mT @ m)

    return 4e-9 * m.numel() / seconds(act)


if __name__ == "__main__":
    main()

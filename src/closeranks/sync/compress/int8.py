"""A codec that compresses gradients to eight bits.

Each block of 256 values is divided by its largest magnitude and rounded to 127 steps in each direction: 4 bytes of
scale for 256 of values, 3.94 times less than float32. The error of a value is at most half a step, 1/254 of the block's
largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closeranks.sync.compress.codec import as_bytes, from_blocks, from_bytes, in_blocks, num_blocks
from closeranks.sync.compress.half_precision import block_absmax

BLOCK = 256
STEPS = 127
_SCALE_BYTES = 4


class Int8Codec:
    def num_bytes(self, numel: int) -> int:
        return num_blocks(numel, BLOCK) * (_SCALE_BYTES + BLOCK)

    def contraction(self, numel: int) -> float:
        """Worst case: one value of a block is large, and each of the others loses half a step."""
        return 1.0 - (BLOCK - 1) / (2 * STEPS) ** 2

    def encode(self, rows: Tensor) -> Tensor:
        blocks = in_blocks(rows, BLOCK)
        scales = block_absmax(blocks)
        steps = (blocks * (STEPS / scales.to(rows.dtype))).round_()
        return torch.cat([as_bytes(scales), as_bytes(steps.to(torch.int8))], dim=1)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        count = num_blocks(numel, BLOCK)
        scales, steps = codes[:, : count * _SCALE_BYTES], codes[:, count * _SCALE_BYTES :]
        blocks = from_bytes(steps, torch.int8).to(dtype).view(-1, count, BLOCK)
        return from_blocks(blocks * (from_bytes(scales, torch.float32).to(dtype) / STEPS).unsqueeze(2), numel)

    def describe(self, what: str) -> str:
        return f"{what} are sent in 8 bits"

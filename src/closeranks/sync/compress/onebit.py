"""A codec that compresses gradients to one bit.

Sends the sign of each value, eight to a byte, and the mean magnitude of every 2048 of them: 31.5 times less than
float32. Where all values of a block have the same magnitude nothing is lost; where one is large and all others are
zero, nearly all is, and error feedback sends it later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closeranks.sync.compress.codec import as_bytes, from_blocks, from_bytes, in_blocks, num_blocks

BLOCK = 2048
_SCALE_BYTES = 4


class OneBitCodec:
    def num_bytes(self, numel: int) -> int:
        return num_blocks(numel, BLOCK) * (_SCALE_BYTES + BLOCK // 8)

    def contraction(self, numel: int) -> float:
        """Worst case: a block of n values with a single one that is not zero keeps 1/n of it; gradients keep about two
        thirds (2 / pi, for normally distributed values)."""
        return 1.0 / min(BLOCK, numel)

    def encode(self, rows: Tensor) -> Tensor:
        blocks = in_blocks(rows, BLOCK)
        scales = blocks.abs().sum(dim=2) / _counts(rows.shape[1], rows)
        bits = (blocks >= 0).view(rows.shape[0], -1, 8).to(torch.uint8)
        return torch.cat([as_bytes(scales.to(torch.float32)), (bits * _weights(rows)).sum(2, dtype=torch.uint8)], dim=1)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        count = num_blocks(numel, BLOCK)
        scales, packed = codes[:, : count * _SCALE_BYTES], codes[:, count * _SCALE_BYTES :]
        bits = packed.unsqueeze(2).bitwise_and(_weights(codes)).ne(0)
        signs = bits.view(-1, count, BLOCK).to(dtype).mul_(2).sub_(1)
        return from_blocks(signs * from_bytes(scales, torch.float32).to(dtype).unsqueeze(2), numel)

    def describe(self, what: str) -> str:
        return f"{what} are sent in 1 bit"


def _weights(like: Tensor) -> Tensor:
    """1, 2, 4 ... 128, computed on the device: a GPU would wait for a copy from the host."""
    return torch.ones(8, dtype=torch.uint8, device=like.device) << torch.arange(
        8, dtype=torch.uint8, device=like.device
    )


def _counts(numel: int, like: Tensor) -> Tensor:
    """The number of values in each block: the last may be short."""
    begins = torch.arange(0, numel, BLOCK, dtype=torch.int64, device=like.device)
    return (numel - begins).clamp_(max=BLOCK).to(like.dtype)

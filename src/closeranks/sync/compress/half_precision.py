"""Codecs that compress gradients to sixteen bits: bf16 and fp16.

bf16 keeps the range and eight significant bits; fp16 keeps eleven bits and a small range, so each block is first
divided by its largest magnitude: gradients are sums over tokens and may be large. Both lose at most the last bit they
keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closeranks.sync.compress.codec import as_bytes, from_bytes, num_blocks

BLOCK = 1024
_SCALE_BYTES = 4


class BFloat16Codec:
    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def contraction(self, numel: int) -> float:
        return 1.0 - 2.0**-16  # rounding error of eight bits, at most 2^-8 of the value, squared

    def encode(self, rows: Tensor) -> Tensor:
        return as_bytes(rows.to(torch.bfloat16))

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(codes, torch.bfloat16).to(dtype)

    def describe(self, what: str) -> str:
        return f"{what} are sent in bf16"


class Float16Codec:
    """A row's code: the scales of its blocks (the last block may be short), then its values, in whole four-byte words,
    so that both can be read as views."""

    def num_bytes(self, numel: int) -> int:
        return num_blocks(numel, BLOCK) * _SCALE_BYTES + 4 * (-(-numel // 2))

    def contraction(self, numel: int) -> float:
        """Values below 2^-14 of their block's largest lose more bits, but all of them together little of the block."""
        return 1.0 - 2.0**-20

    def encode(self, rows: Tensor) -> Tensor:
        num_rows, numel = rows.shape
        codes = torch.empty(num_rows, self.num_bytes(numel), dtype=torch.uint8, device=rows.device)
        if numel % 2:
            codes[:, -2:] = 0
        scales, values = _lying_in(codes, numel)
        scaled = torch.empty(num_rows, numel, dtype=rows.dtype, device=rows.device)
        for blocks, scale, out in zip(_blocks(rows), _of_blocks(scales, numel), _blocks(scaled), strict=True):
            scale.copy_(block_absmax(blocks))
            torch.div(blocks, scale.to(rows.dtype), out=out)
        values.copy_(scaled)
        return codes

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        scales, values = _lying_in(codes, numel)
        decoded = values.to(dtype, memory_format=torch.contiguous_format, copy=True)
        for blocks, scale in zip(_blocks(decoded), _of_blocks(scales, numel), strict=True):
            blocks.mul_(scale.to(dtype))
        return decoded

    def describe(self, what: str) -> str:
        return f"{what} are sent in fp16"


def _lying_in(codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Scales and values of the codes, as views."""
    border = num_blocks(numel, BLOCK) * _SCALE_BYTES
    return codes[:, :border].view(torch.float32), codes[:, border : border + 2 * numel].view(torch.float16)


def _blocks(rows: Tensor) -> list[Tensor]:
    """``[num_rows, num_blocks, block]`` views of the whole blocks, and of the short one at the end, which is not padded
    so that nothing is copied."""
    border = rows.shape[1] // BLOCK * BLOCK
    whole = rows[:, :border].unflatten(1, (-1, BLOCK)) if border else None
    short = rows[:, border:].unsqueeze(1) if border < rows.shape[1] else None
    return [blocks for blocks in (whole, short) if blocks is not None]


def _of_blocks(scales: Tensor, numel: int) -> list[Tensor]:
    """The scales that belong to each result of ``_blocks``."""
    num_whole = numel // BLOCK
    parts = scales[:, :num_whole, None], scales[:, num_whole:, None]
    return [part for part in parts if part.shape[1]]


def block_absmax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, in float32, rounded up so that no value exceeds it; 1 where all are zero."""
    # Two passes that write nothing are cheaper than one that writes all magnitudes and one that reads them.
    sizes = torch.maximum(blocks.amax(dim=2, keepdim=True), -blocks.amin(dim=2, keepdim=True))
    found = sizes.to(torch.float32) * (1 + 2.0**-22)
    return torch.where(found == 0, torch.ones_like(found), found)

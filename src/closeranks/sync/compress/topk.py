"""Top-k: a codec that sends only the largest values of a gradient.

Sends the largest magnitudes of each block of at most 16384 values, one in a hundred by default: two bytes for the index
in its block and two for the value (bf16; its rounding error goes into error feedback too). At one in a hundred that is
100 times less than float32, indices included. Choosing by block gives codes of equal length, and every part of a model
is sent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from closeranks.sync.compress.codec import as_bytes, from_blocks, from_bytes, in_blocks, num_blocks

BLOCK = 16384
_INDEX_BYTES = _VALUE_BYTES = 2


class TopKCodec:
    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def num_bytes(self, numel: int) -> int:
        block, count = self._blocks(numel)
        return count * self._num_kept(block) * (_INDEX_BYTES + _VALUE_BYTES)

    def contraction(self, numel: int) -> float:
        """The largest values hold at least their share of the square sum, less what bf16 rounds off."""
        block, _ = self._blocks(numel)
        return self._num_kept(block) / block * (1.0 - 2.0**-16)

    def encode(self, rows: Tensor) -> Tensor:
        block, _ = self._blocks(rows.shape[1])
        blocks = in_blocks(rows, block)
        indices = blocks.abs().topk(self._num_kept(block), dim=2, sorted=False).indices
        values = blocks.gather(2, indices).to(torch.bfloat16)
        return torch.cat([as_bytes(indices.to(torch.int16)), as_bytes(values)], dim=1)

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        block, count = self._blocks(numel)
        kept = self._num_kept(block)
        border = count * kept * _INDEX_BYTES
        indices = from_bytes(codes[:, :border], torch.int16).to(torch.int64).view(-1, count, kept)
        values = from_bytes(codes[:, border:], torch.bfloat16).to(dtype).view(-1, count, kept)
        blocks = torch.zeros(codes.shape[0], count, block, dtype=dtype, device=codes.device)
        return from_blocks(blocks.scatter_(2, indices, values), numel)

    def describe(self, what: str) -> str:
        return f"the largest {self._ratio:.2%} of {what} are sent"

    def _blocks(self, numel: int) -> tuple[int, int]:
        """Size and number of blocks, as even as possible, so that little of the last is padding."""
        count = num_blocks(numel, BLOCK)
        return -(-numel // count), count

    def _num_kept(self, block: int) -> int:
        return max(1, math.ceil(self._ratio * block))

"""The interface of a codec, which compresses gradients.

A codec encodes each row of a matrix as bytes, equally many for rows of the same length, and decodes them. It knows
nothing of ranks and error feedback: ``two_shot`` sends its codes, ``error_feedback`` keeps the compression
error.

[Note: contraction] With error feedback a codec may lose a lot in one step as long as it never loses everything: where
``|x - decode(encode(x))|^2 <= (1 - delta) |x|^2``, the accumulated error after any number of steps is at most
``2 sqrt(1 - delta) / delta`` times the largest gradient (Karimireddy et al. 2019, lemma 3). Each codec states its
``delta`` as ``contraction``; tests check it.

Invariant: a non-finite value decodes to a non-finite value, so that the vote of the step sees it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    def num_bytes(self, numel: int) -> int:
        """Size of the code of a row of ``numel`` values."""
        ...

    def contraction(self, numel: int) -> float:
        """See [Note: contraction]; the worst case for rows of this length."""
        ...

    def encode(self, rows: Tensor) -> Tensor:
        """``[num_rows, numel]`` as bytes ``[num_rows, num_bytes(numel)]``."""
        ...

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The inverse; returns a new tensor."""
        ...

    def describe(self, what: str) -> str:
        """For people: ``gradients are sent in 8 bits``, where ``what`` is ``gradients``."""
        ...


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """``[num_rows, num_blocks, block]``, the last block padded with zeros."""
    missing = -rows.shape[1] % block
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return padded.reshape(rows.shape[0], -1, block)


def from_blocks(blocks: Tensor, numel: int) -> Tensor:
    return blocks.reshape(blocks.shape[0], -1)[:, :numel].contiguous()


def num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of each row."""
    rows = values.reshape(values.shape[0], -1)
    return rows.contiguous().view(torch.uint8)


def from_bytes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of each row's bytes. Copied first where a slice of columns is not aligned for the type."""
    return codes.clone(memory_format=torch.contiguous_format).view(dtype)

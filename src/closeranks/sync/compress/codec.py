"""What must a code of numbers do?

A codec turns each row of a matrix into bytes, as many for every row of the same length, and back. It knows nothing of
ranks and of what was left unsent before: ``two_shot`` sends its codes, ``memory`` keeps what they lost.

[Note: contraction] With error feedback a codec may lose a lot in one step as long as it never loses everything: where
``|x - decode(encode(x))|^2 <= (1 - delta) |x|^2``, what is left unsent after any number of steps is at most
``2 sqrt(1 - delta) / delta`` times the largest gradient (Karimireddy et al. 2019, lemma 3). Each codec states its
``delta``; tests hold it to it.

Invariant: a value that is not finite decodes to one that is not, so that the vote of the step sees it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    def num_bytes(self, numel: int) -> int:
        """Of the code of a row."""
        ...

    def delta(self, numel: int) -> float:
        """See [Note: contraction]; the least for any row of this length."""
        ...

    def encode(self, rows: Tensor) -> Tensor:
        """``[num_rows, numel]`` as bytes ``[num_rows, num_bytes(numel)]``."""
        ...

    def decode(self, codes: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Back; a tensor of its own."""
        ...

    def words(self, what: str) -> str:
        """For people: ``gradients travel in 8 bits``, where ``what`` is ``gradients``."""
        ...


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """``[num_rows, num_blocks, block]``, zeros at the end of the last block."""
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
    """Values of each row's bytes. A slice of columns may begin where the type may not: it is copied first."""
    return codes.clone(memory_format=torch.contiguous_format).view(dtype)

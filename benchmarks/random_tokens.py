"""What does a model read when only its speed matters? Random tokens of its whole vocabulary.

Text read as bytes would touch 256 rows of the embedding; a real tokenizer's output is spread out. Invariant: the same
arguments give the same samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUM_SAMPLES = 256


class RandomTokens:
    """A source of ``NUM_SAMPLES`` samples of ``seq_len`` tokens and the one that follows."""

    def __init__(self, seq_len: int, vocab_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(vocab_size, (NUM_SAMPLES, seq_len + 1), generator=generator)
        self.identity = f"random tokens (seq_len {seq_len}, vocabulary {vocab_size}, seed {seed})"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, indices: Any) -> dict[str, Tensor]:
        return {"tokens": self._tokens[torch.as_tensor(indices)]}

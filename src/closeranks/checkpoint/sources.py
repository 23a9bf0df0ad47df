"""The chunks of a save: from a capture's plan, or straight from the tensors where training waits for the save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from closeranks.capture.plan import Plan, octets, plan
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.digests import crc32c, item_bytes
from closeranks.checkpoint.manifest import Chunk
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece


def chunks_of(plan: Plan, crcs: Sequence[int]) -> tuple[Chunk, ...]:
    """``crcs``: of the saved entries, in their order. Raises ``CheckpointError`` for a type that cannot be saved."""
    chunks = []
    for number, crc in zip(plan.saved, crcs, strict=True):
        entry = plan.entries[number]
        try:
            item_bytes(entry.dtype)
        except ValueError as error:
            raise CheckpointError(f"{entry.section}/{entry.key} cannot be saved: {error}") from error
        piece = Piece(entry.key, entry.shape, entry.start, entry.size, entry.flat)
        chunks.append(Chunk(entry.section, entry.key, entry.dtype, piece, entry.num_bytes, crc))
    return tuple(chunks)


class Straight:
    """Tensors as they are, for a save that training waits for: no copy of the CPU's tensors, and of a device's no more
    than the chunks somebody is looking at."""

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._tensors = tensors
        self._plan = plan(tensors)

    def chunks(self) -> tuple[Chunk, ...]:
        """With their digests: reads all of it once."""
        return chunks_of(self._plan, [crc32c(self(number)) for number in range(len(self._plan.saved))])

    def __call__(self, number: int) -> memoryview:
        """The bytes of a chunk."""
        span = self._plan.spans[self._plan.saved[number]]
        source = span.of(self._tensors[span.tensor].tensor).view(torch.uint8)
        if source.is_cuda:  # pinned memory comes from a cache: each chunk of its own, and none is allocated twice
            source = torch.empty_like(source, device="cpu", pin_memory=True).copy_(source)
        return octets(source).data

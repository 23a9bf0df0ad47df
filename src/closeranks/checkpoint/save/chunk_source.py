"""The chunks of a save: from a capture plan, or directly from the tensors if training waits for the save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from closeranks.capture.capture_plan import CapturePlan, plan_capture, tensor_bytes
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.format.digests import crc32c, item_bytes
from closeranks.checkpoint.format.manifest import Chunk
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece


def chunks_of_plan(plan: CapturePlan, crcs: Sequence[int]) -> tuple[Chunk, ...]:
    """``crcs``: of the saved entries, in order. Raises ``CheckpointError`` for a dtype that cannot be saved."""
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


class TensorChunkSource:
    """Chunks read from the tensors' own memory, for a save that training waits for: CPU tensors are not copied, and of
    tensors on a device only the chunks in use are."""

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._tensors = tensors
        self._plan = plan_capture(tensors)

    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks with their digests: reads everything once."""
        return chunks_of_plan(self._plan, [crc32c(self(number)) for number in range(len(self._plan.saved))])

    def __call__(self, number: int) -> memoryview:
        """The bytes of a chunk."""
        span = self._plan.spans[self._plan.saved[number]]
        source = span.view_of(self._tensors[span.tensor].tensor).view(torch.uint8)
        if source.is_cuda:  # a fresh buffer per chunk is cheap: torch caches pinned memory
            source = torch.empty_like(source, device="cpu", pin_memory=True).copy_(source)
        return tensor_bytes(source).data

"""A DCP save planner for tensors that are not in memory.

It lists what is to be exported, and reads each band of a tensor when the writer requests it. Invariant: a band has at
most ``_BAND_BYTES``, or one row if a row is larger; the bands of a tensor cover it without overlap.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from closeranks.checkpoint.dcp.export_source import ExportSource, LazyTensor
from closeranks.checkpoint.weights.protocol import row_bands
from closeranks.core.pieces import Piece

_BAND_BYTES = 32 << 20


class LazySavePlanner(SavePlanner):
    """Saves ``source``, whatever state dict it is given; ``on_bytes`` is called with the size of each read."""

    def __init__(self, source: ExportSource, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._source = source
        self._tensors = {tensor.name: tensor for tensor in source.tensors}
        self._on_bytes = on_bytes

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """The state dict is ignored."""

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._source.values]
        for tensor in self._source.tensors:
            items += [_item(tensor, piece) for piece in _pieces(tensor)]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        paths = {tensor.name: tensor.path for tensor in self._source.tensors}
        return plans, dataclasses.replace(metadata, planner_data={**paths, **self._source.paths})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._source.values[index.fqn]

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self.lookup_object(write_item.index), buffer)
            return buffer
        tensor, data = self._tensors[write_item.index.fqn], write_item.tensor_data
        assert data is not None
        piece = Piece(tensor.name, tensor.shape, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        found = tensor.read(piece)
        self._on_bytes(found.nbytes)
        return found


def _pieces(tensor: LazyTensor) -> list[Piece]:
    whole = Piece.whole(tensor.name, tensor.shape)
    return [band.piece for band in row_bands(whole, tensor.dtype.itemsize, _BAND_BYTES)] or [whole]


def _item(tensor: LazyTensor, piece: Piece) -> WriteItem:
    start, size = torch.Size(piece.start), torch.Size(piece.size)
    chunk = ChunkStorageMetadata(offsets=start, sizes=size)
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(tensor.name, start), WriteItemType.SHARD, tensor_data=data)

"""A DCP storage reader: loads a checkpoint of ours with ``torch.distributed.checkpoint``, into any layout.

    dcp.load(state_dict, storage_reader=CheckpointStorageReader("runs/tiny"))

DCP's planner decides which part of each tensor a rank needs; the part is read from the chunks that overlap it. To the
planner every tensor is one chunk: the reader hides how our chunks lie in files. Invariants: every byte that reaches a
tensor was checked against its digest; all ranks read the same checkpoint, or all raise; nothing in a file is unpickled.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from closeranks.checkpoint.dcp.names import Names, TensorKey
from closeranks.checkpoint.dcp.tree import DcpListing, list_for_dcp
from closeranks.checkpoint.dcp.values import decode
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece


class CheckpointStorageReader(StorageReader):
    """``place``: a run folder, its checkpoints folder, one checkpoint, or a URL of those; of several, the newest
    whose documents, files and headers are valid.

    ``names``: the paths of model and optimizer in the state dict to load; None: the paths they had when DCP saved it,
    or ``model`` and ``optimizer``.
    """

    def __init__(self, place: str | Path, names: Names | None = None) -> None:
        super().__init__()
        self._place = str(place)
        self._names = names
        self._opened: _Opened | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._place

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._place = str(checkpoint_id)
        self._opened = None

    # No keyword arguments: DCP would take them as a sign of per-rank metadata, and look for it after an error.
    def read_metadata(self) -> Metadata:
        opened = self._open()
        found: dict[str, STORAGE_TYPES] = {name: BytesStorageMetadata() for name in opened.listed.values}
        for name, tensor_key in opened.listed.tensors.items():
            shape = torch.Size(opened.shape(tensor_key))
            properties = TensorProperties(dtype=opened.reader.dtype(tensor_key.section, tensor_key.key))
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
            found[name] = TensorStorageMetadata(properties, shape, [chunk])
        meta = StorageMeta(checkpoint_id=opened.reader.path)
        return Metadata(found, planner_data=dict(opened.listed.paths), storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan.storage_data = self._identity()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        for rank, plan in enumerate(plans):
            if plan.storage_data != self._identity():
                what = f"ranks found different checkpoints in {self._place}: one was saved meanwhile"
                raise CheckpointError(what, "Name one checkpoint, not the folder that holds all of them.", rank=rank)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._read_value(item, planner)
            else:
                self._read_tensor(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _open(self) -> _Opened:
        if self._opened is None:
            reader = open_newest(self._place)
            self._opened = _Opened(reader, list_for_dcp(reader.manifest, self._names))
        return self._opened

    def _identity(self) -> tuple[str, str]:
        manifest = self._open().reader.manifest
        return manifest.name, manifest.save

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        opened = self._open()
        tensor_key = opened.listed.tensors[item.storage_index.fqn]
        piece = Piece(tensor_key.key, opened.shape(tensor_key), tuple(item.storage_offsets), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        opened.reader.read_into(tensor_key.section, tensor_key.key, piece, target)
        planner.commit_tensor(item, target)

    def _read_value(self, item: ReadItem, planner: LoadPlanner) -> None:
        """DCP's planners expect values as bytes of ``torch.save``: they are created here, from checked JSON."""
        buffer = io.BytesIO()
        torch.save(decode(self._open().listed.values[item.storage_index.fqn]), buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)


class _Opened:
    """A checkpoint, and the DCP names of its tensors."""

    def __init__(self, reader: CheckpointReader, listed: DcpListing) -> None:
        self.reader = reader
        self.listed = listed
        sections = {tensor_key.section for tensor_key in listed.tensors.values()}
        self._shapes = {section: reader.shapes(section) for section in sections}

    def shape(self, tensor_key: TensorKey) -> tuple[int, ...]:
        return self._shapes[tensor_key.section][tensor_key.key]

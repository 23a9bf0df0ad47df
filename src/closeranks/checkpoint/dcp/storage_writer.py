"""A DCP storage writer: saves into a checkpoint of ours with ``torch.distributed.checkpoint``.

    dcp.save(state_dict, storage_writer=CheckpointStorageWriter("runs/tiny/checkpoints", step=40))

DCP's planner decides which rank writes what, each item once. Every rank writes its data file and reads it back from the
medium; DCP's own gather brings the sealed parts to the coordinator, which publishes the manifest and updates
``latest``. Invariants: a checkpoint is committed only when the files of all ranks are durable and were read back; the
folder of a committed checkpoint is never written to; nothing is pickled, and a value that would need it is refused by
name.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from closeranks.checkpoint.dcp.names import Names
from closeranks.checkpoint.dcp.rank_part import SaveRank, TensorWrite, write_part
from closeranks.checkpoint.dcp.tree import KEY, dcp_tree_entry
from closeranks.checkpoint.dcp.values import encode
from closeranks.checkpoint.format.data_file import SaveError
from closeranks.checkpoint.format.manifest import (
    MANIFEST,
    RankPart,
    decode_part,
    encode_part,
    folder_name,
    parse_folder,
)
from closeranks.checkpoint.save.commit import commit
from closeranks.checkpoint.save.save_task import SaveTask
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import StorageError

_LOCK_WAIT_S = 60.0
_LOCKS: dict[str, ExitStack] = {}
"""Places whose lock this process holds for a DCP save. If another rank fails, DCP makes no call that could release the
lock: then the next save to the same place releases it, or the end of the process."""


class CheckpointStorageWriter(StorageWriter):
    """``place``: the checkpoints folder or its URL; with ``step`` None, one checkpoint in it (``.../step-00000040``),
    like the ``checkpoint_id`` of ``dcp.save``.

    ``names``: the paths of model and optimizer in the state dict. ``tree``: plain values to store with it. ``metric``:
    what retention ranks by, smaller is better. Retention is not applied: use ``closeranks ckpt prune``.
    """

    def __init__(
        self,
        place: str | Path,
        step: int | None = None,
        *,
        names: Names | None = None,
        tree: Mapping[str, Any] | None = None,
        metric: float | None = None,
        layout: str = "",
        read_back: bool = True,
    ) -> None:
        super().__init__()
        self._place, self._folder = _split(str(place)) if step is None else (str(place), folder_name(step))
        self._names = names or Names()
        self._tree = dict(tree or {})
        self._metric = metric
        self._layout = layout
        self._read_back = read_back

    @property
    def checkpoint_id(self) -> str:
        return f"{self._place}/{self._folder}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._place, self._folder = _split(str(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        if not kwargs.get("use_collectives", True):
            what = "a checkpoint cannot be saved without collectives: its manifest lists what all ranks wrote"
            raise CheckpointError(what, "Keep use_collectives=True.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: takes the lock, so that nothing is removed from this place until ``finish``."""
        storage = open_storage(self._place)
        if MANIFEST in storage.names(self._folder):
            raise CheckpointError(f"{self.checkpoint_id} is already a checkpoint", "Save under another step.")
        self._unlock()
        held = _LOCKS[storage.url] = ExitStack()
        try:
            held.enter_context(storage.lock(f"a process that saves {self._folder}", wait_s=_LOCK_WAIT_S))
        except StorageError as error:
            raise CheckpointError(f"{self.checkpoint_id} cannot be saved now: {error}", "Save again later.") from error
        return [replace(plan, storage_data=SaveRank(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = self._results(plan, planner)
        except BaseException:
            self._unlock()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when the files of every rank are durable."""
        values: dict[str, Any] = {}
        parts: list[RankPart] = []
        for rank, rows in enumerate(results):
            for row in rows:
                if isinstance(row.storage_data, bytes):
                    parts.append(decode_part(row.storage_data, f"the part of rank {rank}"))
                else:
                    values[row.index.fqn] = row.storage_data
        self._commit(
            parts, len(results), {**self._tree, KEY: dcp_tree_entry(self._names, values, metadata.planner_data)}
        )

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return parse_folder(str(checkpoint_id).rstrip("/").rpartition("/")[2]) is not None

    def _results(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Each value as JSON; the sealed part is attached to the first tensor."""
        values = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        results = [WriteResult(item.index, 0, encode(_value(item, planner), item.index.fqn)) for item in values]
        if tensors:
            part = self._write(plan.storage_data, tensors, planner)
            num_bytes = sum(file.num_bytes for file in part.files)
            results.append(WriteResult(tensors[0].index, num_bytes, encode_part(part)))
        return results

    def _write(self, save_rank: SaveRank, items: list[WriteItem], planner: SavePlanner) -> RankPart:
        def load(number: int) -> torch.Tensor:
            found = planner.resolve_data(items[number])
            assert isinstance(found, torch.Tensor)
            return found.detach().cpu()

        writes = [self._tensor_write(item) for item in items]
        return write_part(open_storage(self._place), self._folder, save_rank, writes, load, is_checked=self._read_back)

    def _tensor_write(self, item: WriteItem) -> TensorWrite:
        assert item.tensor_data is not None
        tensor_key, chunk = self._names.tensor_key(item.index.fqn), item.tensor_data.chunk
        piece = Piece(tensor_key.key, tuple(item.tensor_data.size), tuple(chunk.offsets), tuple(chunk.sizes))
        return TensorWrite(tensor_key.section, piece, str(item.tensor_data.properties.dtype).removeprefix("torch."))

    def _commit(self, parts: list[RankPart], num_ranks: int, tree: Mapping[str, Any]) -> None:
        parsed = parse_folder(self._folder)
        assert parsed is not None
        task = SaveTask(
            save=f"dcp-{secrets.token_hex(8)}",
            folder=self._folder,
            step=parsed[0],
            rank=0,
            num_ranks=num_ranks,
            layout=self._layout,
            chunks=(),
            is_full=True,
            to_remote=False,
            tree=tree,
            metric=self._metric,
        )
        try:
            commit(open_storage(self._place), task, parts)
        except (SaveError, StorageError) as error:
            raise CheckpointError(f"{self.checkpoint_id} was not saved: {error}", "Save again later.") from error
        finally:
            self._unlock()

    def _unlock(self) -> None:
        held = _LOCKS.pop(open_storage(self._place).url, None)
        if held is not None:
            held.close()


def _split(place: str) -> tuple[str, str]:
    root, _, name = place.rstrip("/").rpartition("/")
    if parse_folder(name) is None:
        what = f"'{place}' is not a checkpoint's path: its last part is not like {folder_name(40)}"
        raise CheckpointError(what, "Give the step, or a path that ends like that.")
    return root or ".", name


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """The value before it is pickled: torch's default planner, and planners derived from it, give access to it."""
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    return torch.load(data, weights_only=True)

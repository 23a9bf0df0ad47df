"""Writes weights in another format, whatever they are read from.

Formats: a checkpoint of ours with only weights, a torch DCP folder, a ``torch.save`` file, a safetensors file.
Invariants: the output appears under its name complete and durable, or not at all; nothing that exists is replaced; all
but ``torch.save``, which needs everything at once, hold one band of a tensor in memory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from closeranks.checkpoint.dcp.export_source import ExportSource, LazyTensor
from closeranks.checkpoint.dcp.planner import LazySavePlanner
from closeranks.checkpoint.dcp.storage_writer import CheckpointStorageWriter
from closeranks.checkpoint.weights.protocol import row_bands
from closeranks.checkpoint.weights.safetensors_file import FORMAT_NAMES
from closeranks.core.errors import CheckpointError, SetupError
from closeranks.core.pieces import Piece
from closeranks.storage.disk import fsync_folder

OnBytes = Callable[[int], None]
_FILE = "__0_0.distcp"


def to_closeranks(export_source: ExportSource, out: Path, source: str, on_bytes: OnBytes) -> None:
    """A checkpoint of step 0 that holds only weights, and says so in its tree."""
    with _renamed_when_done(out) as temporary:
        tree = {"weights_only": True, "source": source}
        # It is read twice: once for the checksums, once to be written.
        _save(
            CheckpointStorageWriter(temporary, 0, tree=tree), export_source, lambda num_bytes: on_bytes(num_bytes // 2)
        )


def to_dcp(export_source: ExportSource, out: Path, on_bytes: OnBytes) -> None:
    """A folder that ``torch.distributed.checkpoint.load`` reads."""
    with _renamed_when_done(out) as temporary:
        temporary.mkdir()
        _save(_OneByOne(temporary), export_source, on_bytes)
        fsync_folder(temporary)


def to_torch(export_source: ExportSource, out: Path, on_bytes: OnBytes) -> None:
    """A file for ``torch.load(weights_only=True)``: tensors by their names in the model. Holds all of it in memory."""
    found = {}
    for tensor in export_source.tensors:
        found[model_key(tensor)] = tensor.read(Piece.whole(tensor.name, tensor.shape))
        on_bytes(tensor.num_bytes)
    with _renamed_when_done(out) as temporary, temporary.open("wb") as file:
        _torch_save(found, file)
        file.flush()
        os.fsync(file.fileno())


def to_safetensors(export_source: ExportSource, out: Path, on_bytes: OnBytes) -> None:
    """One safetensors file: tensors by their names in the model."""
    # Larger elements first, so that all tensors are aligned.
    tensors = sorted(export_source.tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with _renamed_when_done(out) as temporary, temporary.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            for band in row_bands(Piece.whole(tensor.name, tensor.shape), tensor.dtype.itemsize):
                data = tensor.read(band.piece).contiguous().view(-1).view(torch.uint8).numpy()
                file.write(data.data)
                on_bytes(data.nbytes)
        file.flush()
        os.fsync(file.fileno())


def model_key(tensor: LazyTensor) -> str:
    """Its name in the model, which is the last part of its path."""
    return str(tensor.path[-1])


def _header(tensors: list[LazyTensor]) -> bytes:
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        if tensor.dtype not in FORMAT_NAMES:
            what = f"'{model_key(tensor)}' is of {tensor.dtype}, which safetensors does not support"
            raise CheckpointError(what, "Convert to another format.")
        end = begin + tensor.num_bytes
        row = {"dtype": FORMAT_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        rows[model_key(tensor)] = row
        begin = end
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _save(writer: StorageWriter, export_source: ExportSource, on_bytes: OnBytes) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is intended
        try:
            save({}, storage_writer=writer, planner=LazySavePlanner(export_source, on_bytes), no_dist=True)
        except CheckpointException as error:
            raise next(failure for failure, _ in error.failures.values()) from error


def _torch_save(value: object, file: BinaryIO) -> None:
    """``torch.save``, which raises ``RuntimeError`` if the disk is full."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


class _OneByOne(FileSystemWriter):
    """Writes one tensor at a time: torch's own writer keeps every tensor of a file in memory until the file is done."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (Path(self.path) / _FILE).open("wb") as file:
            for item in plan.items:
                data, offset = planner.resolve_data(item), file.tell()
                if isinstance(data, torch.Tensor):
                    _torch_save(data, file)
                else:
                    file.write(data.getbuffer())
                num_bytes = file.tell() - offset
                results.append(WriteResult(item.index, num_bytes, _StorageInfo(_FILE, offset, num_bytes)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@contextmanager
def _renamed_when_done(out: Path) -> Iterator[Path]:
    """A temporary path beside ``out`` that is renamed to ``out`` at the end; removed on failure."""
    refuse_existing(out)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}.aside"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        refuse_existing(out)  # another process may have created it meanwhile
        temporary.rename(out)
        fsync_folder(out.parent)
    except OSError as error:
        why = error.strerror or str(error)
        raise SetupError(f"{out} cannot be written: {why}", "Check the path and the space left.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.is_file():
            temporary.unlink()


def refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} already exists", "Choose another path, or remove it first.")

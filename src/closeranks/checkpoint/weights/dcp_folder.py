"""Reads weights from a folder written by torch's ``dcp.save``.

Its pickled metadata goes through an allow-list (``dcp/metadata.py``), each chunk through ``torch.load`` with
``weights_only=True``. DCP stores no checksum of its own, but ``torch.save`` leaves a CRC32 in each chunk, which torch
does not check when it loads: it is checked here. Invariants: a chunk has the dtype and shape given in the metadata, a
piece is made of exactly the chunks that overlap it, and a truncated or changed chunk is refused by name. A chunk is
always read as a whole, since ``torch.save`` has no partial reads. The last one is cached for callers that read it band
by band.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from closeranks.checkpoint.dcp.index import DcpFileRange, DcpIndex, DcpTensor, parse_index
from closeranks.checkpoint.dcp.metadata import read_metadata
from closeranks.checkpoint.dcp.names import StatePath as StatePath
from closeranks.checkpoint.weights.protocol import BAND_BYTES
from closeranks.checkpoint.weights.torch_file import plain_names
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.reshard import ContiguousBox, TensorBox, plan_copies
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import MissingError, Storage, StorageError

METADATA = ".metadata"
_MODELS: tuple[StatePath, ...] = (
    ("model",),
    ("app", "model"),
    ("state_dict", "model"),
    ("model_state_dict",),
    ("state_dict",),
    ("module",),
)
"""Usual paths of the model in a saved state dict, the most likely first."""
_OTHERS = ("optim", "sched", "lr_", "scaler", "ema", "rng", "dataloader", "sampler", "train_state")
"""If a state dict has none of the paths above: keys with these prefixes (in any case) are not part of the model."""
_FIX = "Copy the folder again from where it was saved."


class DcpFolder:
    """``weights.protocol.Weights`` of a DCP folder."""

    def __init__(self, storage: Storage, index: DcpIndex, prefix: StatePath | None) -> None:
        self._storage = storage
        self._index = index
        self._tensors = _subtree(index.tensors.values(), prefix, storage.url)
        self._last: tuple[DcpFileRange, Tensor] | None = None
        self._is_unsummed = False

    @property
    def path(self) -> str:
        return self._storage.url

    @property
    def notes(self) -> tuple[str, ...]:
        left = len(self._index.tensors) - len(self._tensors)
        found = [f"{left} tensors of {self.path} do not belong to the model and were skipped."] if left else []
        if self._is_unsummed:
            found.append(f"{self.path} was saved without checksums: damage within tensors would not be detected.")
        return tuple(found)

    def names(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return _dtype(self._stored(name))

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        stored = self._stored(name)
        if piece.shape != stored.shape:
            what = f"{self.path}: '{name}' has the shape {list(stored.shape)}, not {list(piece.shape)}"
            raise CheckpointError(what, "Start from weights of the same model.")
        found = torch.empty(piece.local_shape, dtype=dtype or _dtype(stored))
        todo = plan_copies(piece, [chunk for chunk, _ in stored.chunks])
        if todo.missing:
            raise CheckpointError(f"{self.path} is damaged: '{name}' is incomplete", _FIX)
        for overlap in todo.overlaps:
            chunk, slot = stored.chunks[overlap.saved]
            source = self._load(slot, chunk, stored)
            _within(found, overlap.target, overlap.box).copy_(_within(source, overlap.source, overlap.box))
        return found

    def _stored(self, name: str) -> DcpTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor '{name}'", "Start from weights of the same model.")
        return self._tensors[name]

    def _load(self, slot: DcpFileRange, chunk: Piece, stored: DcpTensor) -> Tensor:
        if self._last is None or self._last[0] != slot:
            self._last = None  # one chunk in memory, not two
            self._last = (slot, self._checked(slot, chunk, stored))
        return self._last[1]

    def _checked(self, slot: DcpFileRange, chunk: Piece, stored: DcpTensor) -> Tensor:
        what = f"{self.path}: '{stored.name}' in {slot.file} is damaged"
        try:
            data = self._storage.read(slot.file, slot.offset, slot.num_bytes)
        except StorageError as error:
            raise CheckpointError(f"{what}: {error}", _FIX) from error
        try:
            self._is_unsummed |= not check_archive(data)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and torch each have their own
            raise CheckpointError(f"{what}: {_first_line(error)}", _FIX) from error
        if not isinstance(found, Tensor) or found.shape != chunk.size or found.dtype != _dtype(stored):
            raise CheckpointError(f"{what}: it is not the tensor that the metadata describes", _FIX)
        return found.detach().contiguous()


def open_dcp(place: str | Path, prefix: Sequence[str] | None = None) -> DcpFolder:
    """Weights in a folder, or under a URL, that ``torch.distributed.checkpoint.save`` wrote.

    ``prefix``: the path of the model in the saved state dict, such as ``["app", "model"]``; empty: the state dict is
    the model's own. None: the usual paths are tried.
    """
    storage = open_storage(place)
    name = f"{storage.url}/{METADATA}"
    try:
        data = storage.read(METADATA)
    except MissingError as error:
        what = f"{storage.url} is not a torch DCP folder: there is no {METADATA} in it"
        raise CheckpointError(what, "Name a folder that dcp.save wrote with collectives on.") from error
    except StorageError as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    index = parse_index(read_metadata(data, name), name)
    return DcpFolder(storage, index, None if prefix is None else tuple(prefix))


def check_archive(data: bytes) -> bool:
    """Check what ``torch.save`` wrote against the CRC32s in it; False if it was configured to omit them."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if not any(info.CRC for info in infos):
            return False
        for info in infos:
            with archive.open(info) as member:
                while member.read(BAND_BYTES):  # raises at the end of a member that does not match
                    pass
    return True


def _subtree(tensors: Iterable[DcpTensor], prefix: StatePath | None, url: str) -> dict[str, DcpTensor]:
    """The model's tensors by their names in the model."""
    all_of_them = list(tensors)
    for places in [(prefix,)] if prefix is not None else [_MODELS, ((),)]:
        for place in places:
            inner = [one for one in all_of_them if len(one.path) > len(place) and one.path[: len(place)] == place]
            if prefix is None and place == ():
                inner = [one for one in inner if not str(one.path[0]).lower().startswith(_OTHERS)]
            if inner:
                return _named(inner, len(place), url)
    tops = sorted({str(one.path[0]) for one in all_of_them})
    where = f" under '{'.'.join(map(str, prefix))}'" if prefix else ""
    raise CheckpointError(f"{url} holds no model{where}", f"It holds {', '.join(tops[:8]) or 'no tensor at all'}.")


def _named(tensors: Sequence[DcpTensor], depth: int, url: str) -> dict[str, DcpTensor]:
    """Tensors by path from a depth on, without what ``torch.compile`` and FSDP insert between module names."""
    inner = {".".join(map(str, one.path[depth:])): one for one in tensors}
    plain = plain_names(inner)
    found = {plain[name]: one for name, one in inner.items()}
    if len(found) < len(tensors):
        raise CheckpointError(f"{url} has duplicate tensor names, under different wrappers", "Save one of them.")
    return found


def _within(tensor: Tensor, run: ContiguousBox, box: TensorBox) -> Tensor:
    """A box of the whole tensor, as a view of the memory that holds a run of it."""
    view = tensor.view(-1)[run.first : run.first + prod(run.box.size)].view(run.box.size)
    for dim, (first, begin, size) in enumerate(zip(run.box.start, box.start, box.size, strict=True)):
        view = view.narrow(dim, begin - first, size)
    return view


def _dtype(stored: DcpTensor) -> torch.dtype:
    found = getattr(torch, stored.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

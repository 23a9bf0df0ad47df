"""Saves weights of any format as one of our checkpoints.

They are read twice, chunk by chunk: once for the checksums that a save needs, once to be written. Invariants: only a
few chunks are in memory at a time, never the model; the checkpoint holds what the first pass read, or the save fails;
it holds only weights, without the progress and identity that a run needs to resume from it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.capture.chunk_ranges import CHUNK_BYTES
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.format.digests import crc32c
from closeranks.checkpoint.format.manifest import Chunk, folder_name
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, SaveTask
from closeranks.checkpoint.save.save_tiers import save_to_all_tiers
from closeranks.checkpoint.weights.hf_shards import ExportTensor, ProgressListener, tensor_memoryview
from closeranks.checkpoint.weights.protocol import Weights, row_bands
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

SECTION = "model"


def save_weights(
    place: str, weights: Weights, tensors: Sequence[ExportTensor], tree: Mapping[str, Any], listener: ProgressListener
) -> str:
    """Write a checkpoint of step 0 at ``place``; returns its path."""
    total = sum(tensor.num_bytes for tensor in tensors)
    wanted = [(tensor, piece) for tensor in tensors for piece in _pieces(tensor)]

    def source(number: int) -> memoryview:
        tensor, piece = wanted[number]
        data = tensor_memoryview(weights.read(tensor.source, piece, tensor.dtype))
        listener.advance(len(data))
        return data

    listener.begin("reading", total)
    found = [_chunk(tensor, piece, source(number)) for number, (tensor, piece) in enumerate(wanted)]
    listener.begin("writing", total)
    reports: list[SaveReport] = []
    task = SaveTask(
        save=f"{secrets.token_hex(8)}-0",
        folder=folder_name(0),
        step=0,
        rank=0,
        num_ranks=1,
        layout="",
        chunks=tuple(found),
        is_full=True,
        to_remote=False,
        tree=tree,
        metric=None,
    )
    save_to_all_tiers(task, source, SaveSettings.from_config(CheckpointConfig(), place), reports.append, lambda: False)
    for report in reports:
        if report.kind == "committed":
            return report.path
    what = next((report.what for report in reports if report.kind == "failed"), f"nothing was written to {place}")
    raise CheckpointError(what)


def _pieces(tensor: ExportTensor) -> list[Piece]:
    """Pieces of at most a chunk's size; a tensor without elements is one piece, so that it keeps its name."""
    whole = Piece.whole(tensor.name, tensor.shape)
    if not whole.numel:
        return [whole]
    rows = [band.piece for band in row_bands(whole, tensor.dtype.itemsize, CHUNK_BYTES)]
    if all(piece.numel * tensor.dtype.itemsize <= CHUNK_BYTES for piece in rows):
        return rows
    flat = whole.flattened(0, whole.numel)  # a single row is larger than a chunk
    return [band.piece for band in row_bands(flat, tensor.dtype.itemsize, CHUNK_BYTES)]


def _chunk(tensor: ExportTensor, piece: Piece, data: memoryview) -> Chunk:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Chunk(SECTION, tensor.name, dtype, piece, len(data), crc32c(data))

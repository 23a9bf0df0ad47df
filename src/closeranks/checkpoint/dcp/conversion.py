"""Converts checkpoints and weights between formats: chooses the reader and the writer.

Invariants: a conversion carries only weights, unless a checkpoint of ours is converted to DCP; a source checkpoint must
have valid documents, sizes and headers, and its chunks are checked as they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from closeranks.checkpoint.dcp import export
from closeranks.checkpoint.dcp.export_source import ExportSource, source_from_checkpoint, source_from_weights
from closeranks.checkpoint.dcp.names import Names
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.weights.open import OURS, detect_format, open_weights
from closeranks.core.errors import CheckpointError

FORMATS = ("closeranks", "dcp", "torch", "safetensors")


@dataclass(frozen=True, slots=True)
class ConvertedCheckpoint:
    source: str
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def convert(
    source: str, out: Path, to: str, on_total: Callable[[int], None], on_bytes: Callable[[int], None]
) -> ConvertedCheckpoint:
    """``on_total`` is called once with the total bytes of tensors, ``on_bytes`` with each further number done."""
    if to not in FORMATS:
        raise CheckpointError(f"'{to}' is not a known format", f"Write one of {', '.join(FORMATS)}.")
    if "://" in str(out) or ":/" in str(out):
        raise CheckpointError(f"{out} is not a local path", "Convert to a local folder, and copy it from there.")
    export.refuse_existing(out)
    export_source, path, notes = _opened(source, to)
    on_total(export_source.num_bytes)
    if to == "closeranks":
        export.to_closeranks(export_source, out, path, on_bytes)
    elif to == "dcp":
        export.to_dcp(export_source, out, on_bytes)
    elif to == "torch":
        export.to_torch(export_source, out, on_bytes)
    else:
        export.to_safetensors(export_source, out, on_bytes)
    return ConvertedCheckpoint(path, len(export_source.tensors), export_source.num_bytes, notes)


def _opened(source: str, to: str) -> tuple[ExportSource, str, tuple[str, ...]]:
    if to == "dcp" and detect_format(source) == OURS:
        reader = open_newest(source)
        return source_from_checkpoint(reader), reader.path, ()
    weights = open_weights(source)
    return source_from_weights(weights, Names()), weights.path, weights.notes

"""Compares two checkpoints by their manifests: which tensors differ.

Reads no tensor data: the layout-independent digest of a tensor is the same whatever layout saved it. Invariant: every
tensor of either checkpoint is in the result once. Imports no torch; ``value_diff`` computes by how much they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from closeranks.checkpoint.format.manifest import CheckpointManifest

TensorVerdict = Literal["equal", "differs", "shape", "dtype", "only in A", "only in B"]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What a manifest says about a whole tensor."""

    shape: tuple[int, ...]
    dtype: str
    digest: int
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    section: str
    key: str
    verdict: TensorVerdict
    a: TensorSummary | None
    b: TensorSummary | None


def tensor_summaries(manifest: CheckpointManifest) -> dict[tuple[str, str], TensorSummary]:
    digests = manifest.digests()
    return {
        name: TensorSummary(
            entries[0].chunk.piece.shape,
            entries[0].chunk.dtype,
            digests[name],
            len(entries),
            sum(entry.chunk.num_bytes for entry in entries),
        )
        for name, entries in manifest.tensors().items()
    }


def diff_manifests(a: CheckpointManifest, b: CheckpointManifest) -> list[TensorDifference]:
    """Every tensor of both, in the order of ``a``, then what only ``b`` has."""
    one, other = tensor_summaries(a), tensor_summaries(b)
    return [
        TensorDifference(*name, _verdict(one.get(name), other.get(name)), one.get(name), other.get(name))
        for name in dict.fromkeys((*one, *other))
    ]


def _verdict(a: TensorSummary | None, b: TensorSummary | None) -> TensorVerdict:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    return "equal" if a.digest == b.digest else "differs"


def tree_differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two trees of plain values differ, as ``progress.step: 20 | 40``."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: list[str] = []
        for key in dict.fromkeys((*a, *b)):
            at = f"{place}.{key}" if place else str(key)
            if key not in a or key not in b:
                found.append(f"{at}: only in {'A' if key in a else 'B'}")
            else:
                found += tree_differences(a[key], b[key], at)
        return found
    return [] if a == b and type(a) is type(b) else [f"{place}: {a!r} | {b!r}"]

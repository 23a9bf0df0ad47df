"""Detects the format of weights at a path or URL and opens them.

The format is decided by which files exist, never by trying one reader after the other, so that errors come from the
reader of the actual format. Invariant: nothing in a file is unpickled or trusted before its format is known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from closeranks.checkpoint.format.manifest import LATEST, MANIFEST, parse_folder
from closeranks.checkpoint.weights import safetensors_folder, torch_file
from closeranks.checkpoint.weights.protocol import Weights
from closeranks.core.errors import CheckpointError

WeightsFormat = str
OURS, SAFETENSORS, TORCH, DCP = "ours", "safetensors", "torch", "dcp"
_KINDS = "a run or checkpoint, a Hugging Face folder, a torch DCP folder, or a .safetensors, .pt, .pth or .bin file"


def open_weights(place: str) -> Weights:
    """The weights at a path or URL, in any supported format."""
    return _OPENERS[detect_format(place)](place)


def detect_format(place: str) -> WeightsFormat:
    """The format of the weights at a place; ``CheckpointError`` with one sentence if it is unknown."""
    if "://" in place and not place.startswith("file://"):
        return OURS
    path = Path(place.removeprefix("file://"))
    if not path.exists():
        raise CheckpointError(f"there is nothing at {place}", f"Name {_KINDS}.")
    kind = _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    if kind is None:
        what = f"{place} holds no weights in a supported format"
        hint = " (a .safetensors file was expected)" if (path / "config.json").is_file() else ""
        raise CheckpointError(f"{what}{hint}", f"Name {_KINDS}.")
    return kind


def _kind_of_folder(path: Path) -> WeightsFormat | None:
    """Our own format first: a run folder has a config.json, too."""
    if (path / MANIFEST).is_file() or (path / LATEST).is_file() or (path / "checkpoints").is_dir():
        return OURS
    if any(parse_folder(child.name) for child in path.iterdir() if child.is_dir()):
        return OURS
    if (path / ".metadata").is_file():
        return DCP
    if any((path / name).is_file() for name in (safetensors_folder.SINGLE, safetensors_folder.INDEX)):
        return SAFETENSORS
    if any((path / name).is_file() for name in (torch_file.SINGLE, torch_file.INDEX)):
        return TORCH
    return None


def _kind_of_file(path: Path) -> WeightsFormat | None:
    if path.suffix == ".safetensors":
        return SAFETENSORS
    return TORCH if path.suffix in (".pt", ".pth", ".bin", ".ckpt") else None


def _ours(place: str) -> Weights:
    from closeranks.checkpoint.weights.checkpoint_weights import open_checkpoint_weights

    return open_checkpoint_weights(place)


def _dcp(place: str) -> Weights:
    from closeranks.checkpoint.weights.dcp_folder import open_dcp

    return open_dcp(place)


_OPENERS: dict[WeightsFormat, Callable[[str], Weights]] = {
    OURS: _ours,
    DCP: _dcp,
    SAFETENSORS: lambda place: safetensors_folder.open_safetensors(Path(place.removeprefix("file://"))),
    TORCH: lambda place: torch_file.open_torch(Path(place.removeprefix("file://"))),
}

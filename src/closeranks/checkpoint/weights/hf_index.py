"""Reads the index of a Hugging Face folder: which file holds each tensor.

A model in several files comes with an index: JSON that maps every tensor to a file in the same folder. Invariant: no
file name in an index leads out of its folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from closeranks.core.errors import CheckpointError
from closeranks.core.system.regular_file import read_bytes

MAX_JSON_BYTES = 100 << 20
"""An index of a million tensors is smaller; a file that claims more is damaged or hostile."""
_AGAIN = "Fetch the folder again."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ``CheckpointError`` with one sentence if there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is implausibly large", _AGAIN)
        value = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path.name} in {path.parent}", "Name a complete folder.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", _AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON", _AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object", _AGAIN)
    return value


def read_index(path: Path) -> Mapping[str, Path]:
    """The file of each tensor; all files exist."""
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path} is damaged: it has no weight_map", _AGAIN)
    files = {str(value): _sibling_path(path, value) for value in table.values()}
    return {str(name): files[str(value)] for name, value in table.items()}


def _sibling_path(index: Path, name: object) -> Path:
    """Symbolic links may point anywhere, as in the hub's own cache; file names may not leave the folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & {"/", "\\", "\0"}:
        what = f"{index} names the file {name!r}, which is not in its folder"
        raise CheckpointError(what, "Do not use this folder; fetch it again.")
    path = index.with_name(name)
    if not path.is_file():
        what = f"{index.parent} is incomplete: {name}, which its index lists, is missing"
        raise CheckpointError(what, _AGAIN)
    return path

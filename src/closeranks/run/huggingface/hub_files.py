"""Keeps the metadata of a Hugging Face folder through a fine-tune, so that an export can write it again.

Ids of special tokens, the longest position, ``generation_config.json`` and the small files of the tokenizer are stored
in the state tree under ``hub``, since the folder may be gone by the time of the export; large tokenizer files are
copied from the folder if it still exists. Invariants: only the file names listed here are ever written; a folder that
lacks them, or cannot be read, means less metadata and never an error.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from closeranks.checkpoint.weights.checkpoint_weights import open_checkpoint_weights
from closeranks.checkpoint.weights.open import OURS, detect_format
from closeranks.core.errors import CheckpointError
from closeranks.core.system.regular_file import open_binary, read_text
from closeranks.storage.protocol import StorageError

SMALL = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)
"""Stored as text in the tree, if they have at most ``_SMALL_BYTES``."""
LARGE = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", *SMALL)
"""Copied from the folder that the weights came from."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SMALL_BYTES = 256 << 10
_SAVED_FILE = "hub.json"
"""In the run folder, for a generation that restores from memory and so has no checkpoint's tree."""


def read_hub_metadata(place: str) -> dict[str, Any]:
    """The metadata beside weights: those of a Hugging Face folder, or of a checkpoint whose weights came from one."""
    with suppress(CheckpointError, StorageError, OSError, ValueError, RecursionError):
        if detect_format(place) == OURS:
            return validate_hub_metadata(open_checkpoint_weights(place).tree.get("hub"))
        path = Path(place.removeprefix("file://")).absolute()
        return read_folder_metadata(path if path.is_dir() else path.parent)
    return {}


def read_folder_metadata(folder: Path) -> dict[str, Any]:
    config = json.loads(read_text(folder / "config.json", _SMALL_BYTES))
    files = {}
    for name in SMALL:
        with suppress(OSError, ValueError):
            files[name] = read_text(folder / name, _SMALL_BYTES)
    return validate_hub_metadata({**config, "source": str(folder), "files": files}) if isinstance(config, dict) else {}


def validate_hub_metadata(hub: Any) -> dict[str, Any]:
    """The values of a tree or a file that have the right type; all others are dropped."""
    if not isinstance(hub, Mapping):
        return {}
    found = {key: hub[key] for key in _IDS if key in hub and _is_id(hub[key])}
    longest = hub.get("max_position_embeddings")
    if type(longest) is int and 0 < longest < 2**31:
        found["max_position_embeddings"] = longest
    if isinstance(hub.get("source"), str):
        found["source"] = hub["source"]
    files = hub.get("files")
    if isinstance(files, Mapping):
        found["files"] = {name: files[name] for name in SMALL if isinstance(files.get(name), str)}
    return found


def saved_hub_metadata(folder: Path, tree: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """The metadata for a run's checkpoints: from the state it resumes from, else from its folder if that has a copy for
    these weights, else from the weights."""
    if hub := validate_hub_metadata(tree.get("hub")):
        return hub
    if not weights:
        return {}
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        saved = json.loads(read_text(folder / _SAVED_FILE, 16 * _SMALL_BYTES))
        if saved["weights"] == weights:
            return validate_hub_metadata(saved["hub"])
    if hub := read_hub_metadata(weights):
        with suppress(OSError):  # a full disk is reported by what matters more
            (folder / _SAVED_FILE).write_text(json.dumps({"weights": weights, "hub": hub}) + "\n")
    return hub


def write_hub_files(hub: Mapping[str, Any], out: Path) -> tuple[str, ...]:
    """Write the files beside exported weights and return their names. The tree's copies win over the folder's."""
    written: list[str] = []
    source = Path(hub["source"]) if hub.get("source") else None
    for name in LARGE:
        text = (hub.get("files") or {}).get(name)
        if text is not None:
            (out / name).write_text(text, encoding="utf-8")
        elif source is None or not _copied(source / name, out / name):
            continue
        written.append(name)
    return tuple(written)


def _copied(path: Path, target: Path) -> bool:
    with suppress(OSError), open_binary(path) as file:
        with target.open("wb") as out:
            shutil.copyfileobj(file, out)
        return True
    return False


def _is_id(value: Any) -> bool:
    """A token id, several of them (a model may have more than one end token), or null for none."""
    ids = value if isinstance(value, list) else [value]
    return value is None or (0 < len(ids) < 1000 and all(type(one) is int and 0 <= one < 2**31 for one in ids))

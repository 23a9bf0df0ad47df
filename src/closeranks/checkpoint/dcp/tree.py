"""Stores what DCP needs of a state dict in a checkpoint's tree, and lists the checkpoint for DCP again.

Under ``dcp`` in the tree: the non-tensor values, the path of every name in the nested state dict, and the prefixes. A
checkpoint saved by training has no such entry, and is listed all the same. Invariant: two tensors never get the same
name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.checkpoint.dcp.names import Names, StatePath, TensorKey
from closeranks.checkpoint.dcp.values import decode
from closeranks.checkpoint.format.manifest import CheckpointManifest
from closeranks.core.errors import CheckpointError

KEY = "dcp"


@dataclass(frozen=True, slots=True)
class DcpListing:
    """The contents of a checkpoint by their DCP names."""

    tensors: Mapping[str, TensorKey]
    values: Mapping[str, Any]
    """Encoded by ``values.encode``."""
    paths: Mapping[str, StatePath]


def list_for_dcp(manifest: CheckpointManifest, names: Names | None) -> DcpListing:
    """``names``: None to use those it was saved with."""
    kept = _checked(manifest)
    saved = Names.decode(kept["names"]) if kept else Names()
    wanted = names or saved
    tensors: dict[str, TensorKey] = {}
    paths: dict[str, StatePath] = {}
    for section, key in manifest.tensors():
        tensor_key = TensorKey(section, key)
        name, path = wanted.name(tensor_key), wanted.path(tensor_key)
        if name is None or path is None:
            continue
        if name in tensors:
            what = f"{manifest.name} has two tensors that DCP would call '{name}'"
            raise CheckpointError(what, "Give other prefixes for model and optimizer (names=...).")
        tensors[name], paths[name] = tensor_key, path
    same = wanted == saved
    known = {name: tuple(path) for name, path in kept.get("paths", {}).items()} if same else {}
    return DcpListing(tensors, kept.get("values", {}) if same else {}, {**paths, **known})


def _checked(manifest: CheckpointManifest) -> Mapping[str, Any]:
    kept = manifest.tree.get(KEY, {})
    if kept == {}:
        return {}
    try:
        names, values, paths = kept["names"], kept.get("values", {}), kept.get("paths", {})
        parts = [part for path in paths.values() for part in path]
        saved = Names.decode(names)
        if any(type(part) not in (str, int) for part in parts) or not saved.model + saved.optimizer:
            raise TypeError
        for value in values.values():
            decode(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{manifest.name} is damaged or invalid: its data for torch DCP is inconsistent"
        raise CheckpointError(what, "Use an earlier checkpoint.") from error
    return {"names": names, "values": values, "paths": paths}


def dcp_tree_entry(names: Names, values: Mapping[str, Any], paths: Mapping[str, StatePath] | None) -> dict[str, Any]:
    """What goes under ``dcp`` in the tree."""
    return {
        "names": names.encode(),
        "values": dict(values),
        "paths": {name: list(path) for name, path in (paths or {}).items()},
    }

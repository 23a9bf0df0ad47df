"""How is a tree of values and tensors taken apart into a JSON skeleton and named tensors, and put together again?

Invariant: ``rebuild(skeleton(tree), dict(tensors(tree)))`` is the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Tree = Mapping[str, Any]


def tensors(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its path."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from tensors(value, f"{prefix}{key}/")


def skeleton(tree: Tree) -> dict[str, Any]:
    """The tree without its tensors; ``{"tensor": true}`` marks where each one goes."""
    return {
        key: {"tensor": True}
        if isinstance(value, Tensor)
        else {"branch": skeleton(value)}
        if isinstance(value, Mapping)
        else {"value": value}
        for key, value in tree.items()
    }


def rebuild(bones: Mapping[str, Any], found: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, entry in bones.items():
        if "tensor" in entry:
            tree[key] = found[f"{prefix}{key}"]
        elif "branch" in entry:
            tree[key] = rebuild(entry["branch"], found, f"{prefix}{key}/")
        else:
            tree[key] = entry["value"]
    return tree

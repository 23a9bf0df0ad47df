"""How is the whole state tree kept in one file?

Tensors lie under their path in the tree, everything else as JSON in the header. Invariant: a damaged, torn or foreign
file is refused by name, never loaded in part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from closeranks.checkpoint.files import FILE_NAME as FILE_NAME
from closeranks.checkpoint.files import StateFile, write_file
from closeranks.checkpoint.pieces import FOLDER_NAME, PieceReader, is_pieces, remove_pieces
from closeranks.checkpoint.trees import Tree, rebuild, skeleton, tensors
from closeranks.core.errors import CheckpointError

_FORMAT = "closeranks-state-1"


def save_tree(tree: Tree, path: Path) -> int:
    """Write the tree; returns its size in bytes. A state in pieces beside it, in the same run folder, is replaced."""
    num_bytes = write_file(path, _FORMAT, skeleton(tree), dict(tensors(tree)))
    if path.name == FILE_NAME:
        remove_pieces(path.parent / FOLDER_NAME)
    return num_bytes


def load_tree(path: Path) -> dict[str, Any]:
    """Read the tree back, every tensor checked against its digest; a state in pieces is put together whole."""
    if is_pieces(path):
        return PieceReader(path).whole_tree()
    if path.is_dir():
        path = path / FILE_NAME
    if not path.exists():
        raise CheckpointError(
            f"there is no state file at {path}", "Name a run folder or a state file of an earlier run."
        )
    file = StateFile(path, _FORMAT)
    found = {name: file.tensor(name) for name in file}
    try:
        return rebuild(file.document, found)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its parts do not fit together", "Use an earlier one.") from error

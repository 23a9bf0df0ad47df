"""Checks the names that a storage may be asked for.

Names come from manifests too, and a manifest may come from anywhere. Invariant: no name leads out of the storage's own
root. Names that begin with a dot are internal (locks, unfinished documents): ``Storage.names`` hides them.
"""

from __future__ import annotations

from closeranks.storage.protocol import StorageError

LOCK = ".lock"
"""Held during one save or one prune."""
OWNER = ".owner"
"""Held by a run from its start to its end."""


def check_name(name: str) -> str:
    """The name itself, if it stays inside: relative, ``/`` between parts, no part empty, ``.`` or ``..``."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise StorageError(f"'{name}' is not a name inside a storage: use parts like step-00000040/manifest.json")
    return name


def is_visible(name: str) -> bool:
    return not name.startswith(".")

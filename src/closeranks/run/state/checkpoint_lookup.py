"""Finds the checkpoints that a user names by a run folder, a checkpoints folder, one checkpoint or a URL.

Imports no torch. Invariant: a path without checkpoints is an error that says what is there instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from closeranks.checkpoint.format.manifest import CheckpointManifest
from closeranks.checkpoint.load.catalogue import Catalogue, FoundCheckpoint, find_checkpoints
from closeranks.core.errors import CheckpointError
from closeranks.telemetry.run_log.run_folder import RunFolder

_PLACES = "Name a run folder, its checkpoints folder, one checkpoint in it, or a URL of those."


def require_checkpoints(place: str) -> Catalogue:
    """All that lies there; nothing at all is a mistake in the place."""
    if not place.strip():
        raise CheckpointError("the path is empty", _PLACES)
    catalogue = find_checkpoints(place)
    if not catalogue.found:
        odd = "".join(f" ({odd.what})" for odd in catalogue.problems if odd.is_damage)
        raise CheckpointError(f"{_nothing(place)}{odd}", _PLACES)
    return catalogue


def _nothing(place: str) -> str:
    """What there is instead of checkpoints; a URL is not asked again."""
    if "://" not in place and not Path(place).expanduser().exists():
        return f"there is nothing at {place}"
    if "://" not in place and RunFolder(Path(place).expanduser()).metrics(0).is_file():
        return f"the run {place} has no checkpoints (checkpoint.save was off, or it ended before the first)"
    return f"there are no checkpoints at {place}"


def pick_checkpoint(place: str) -> tuple[FoundCheckpoint, CheckpointManifest]:
    """The one checkpoint that is named, or the sound one that a resumed run would try first."""
    catalogue = require_checkpoints(place)
    for found in catalogue.candidates():
        if found.manifest is not None:
            return found, found.manifest
    first = catalogue.found[0]
    what = first.problem if first.path in first.problem else f"{first.path}: {first.problem}"
    raise CheckpointError(what, "Name another checkpoint of the run.")


def matches_patterns(name: tuple[str, str], patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names the tensor, with its section or without; no pattern names all."""
    full = "/".join(name)
    return not patterns or any(fnmatchcase(full, pattern) or fnmatchcase(name[1], pattern) for pattern in patterns)


def natural_sort_key(name: tuple[str, str]) -> tuple[str, list[tuple[int, str]]]:
    """To sort tensors by: ranks save their shares in an order of their own, and layer 10 comes after layer 9."""
    section, key = name
    return section, [(int(word or 0), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", key)]

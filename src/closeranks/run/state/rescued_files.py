"""Finds rescued snapshots: the state that hosts wrote to disk after they had lost the job's leader.

The contents of each host's snapshot memory are then in the run folder, slot by slot (``agent.host.rescue``). Invariant:
a state counts only if every image of it is there. Imports no torch.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from closeranks.agent.host.rescue import FOLDER
from closeranks.capture.slots import inspect_slot
from closeranks.elastic.restore_plan import SnapshotCopy, SnapshotLocation, complete_states


@dataclass(frozen=True, slots=True)
class RescuedState:
    """The newest complete state in a run folder."""

    step: int
    folder: str
    files: tuple[str, ...]
    """One for each image."""


def find_rescued(run: Path) -> RescuedState | None:
    files = sorted(str(path) for path in (run / FOLDER).glob("[!.]*/box-*"))
    copies = [
        SnapshotCopy(SnapshotLocation(0, number, 0), header)
        for number, file in enumerate(files)
        if (header := inspect_slot(file).header) is not None
    ]
    states = complete_states(copies, run=0)
    if not states:
        return None
    found = {
        copy.about.image: files[copy.location.local_index] for copy in reversed(copies) if copy.about.key == states[0]
    }
    return RescuedState(states[0][1], str(run / FOLDER), tuple(found[image] for image in sorted(found)))


def remove_rescued(run: Path, step: int) -> None:
    """Called when a checkpoint of this step is committed: older rescued snapshots must not be mixed with those of a
    later loss."""
    if (run / FOLDER).exists() and ((found := find_rescued(run)) is None or found.step <= step):
        shutil.rmtree(run / FOLDER, ignore_errors=True)

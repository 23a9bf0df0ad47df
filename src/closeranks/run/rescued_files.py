"""Which state did hosts write down that had lost their lead?

What lay in a host's memory lies in the run's folder then, slot by slot (``agent.rescue``). Invariant: only a state of
which every image is there counts. Imports no torch.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from closeranks.agent.rescue import FOLDER
from closeranks.capture.slots import inspect
from closeranks.elastic.choosing import Copy, Place, complete_states


@dataclass(frozen=True, slots=True)
class Rescued:
    """The newest whole state of a run's folder."""

    step: int
    folder: str
    files: tuple[str, ...]
    """One for each image."""


def find_rescued(run: Path) -> Rescued | None:
    files = sorted(str(path) for path in (run / FOLDER).glob("[!.]*/box-*"))
    copies = [
        Copy(Place(0, number, 0), about)
        for number, file in enumerate(files)
        if (about := inspect(file).about) is not None
    ]
    states = complete_states(copies, run=0)
    if not states:
        return None
    found = {copy.about.image: files[copy.place.box] for copy in reversed(copies) if copy.about.key == states[0]}
    return Rescued(states[0][1], str(run / FOLDER), tuple(found[image] for image in sorted(found)))


def forget_rescued(run: Path, step: int) -> None:
    """A checkpoint of this step stands: what hosts wrote down before must not be taken for a part of a later loss."""
    if (run / FOLDER).exists() and ((found := find_rescued(run)) is None or found.step <= step):
        shutil.rmtree(run / FOLDER, ignore_errors=True)

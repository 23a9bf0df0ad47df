"""Which state did hosts write down that had lost their lead, and can a run go on from it?

What lay in a host's memory lies in the run's folder then, slot by slot (``agent.rescue``). Invariant: only a state of
which every image is there counts, and every byte of it is checked when it is read; what cannot be read on one rank is
passed over by all.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from closeranks.agent.rescue import FOLDER
from closeranks.core.errors import CheckpointError
from closeranks.elastic.choosing import Copy, Place, complete_states
from closeranks.elastic.recalling import Recalled
from closeranks.elastic.slots import Sealed, SlotError, inspect
from closeranks.run.parts import Parts
from closeranks.run.state import check_fits, restore_state


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


def share_rescued(parts: Parts, run: Path) -> Rescued | None:
    """Rank 0 looks, so that all ranks try the same."""
    found = find_rescued(run) if parts.world.is_lead else None
    text = json.dumps([found.step, found.folder, found.files]) if found is not None else ""
    if not (text := parts.groups.world.share_text(text)):
        return None
    step, folder, files = json.loads(text)
    return Rescued(step, folder, tuple(files))


@dataclass(frozen=True, slots=True)
class Read:
    """How one rank fared with it."""

    recalled: Recalled | None = None
    problem: str = ""
    refusal: tuple[str, str] | None = None
    """What does not fit the job, and what to do."""


def read_rescued(parts: Parts, rescued: Rescued, *, may_be_done: bool) -> Read:
    """Into the parts. Never raises for what it finds: some ranks may see more of a state than others."""
    try:
        with Recalled([Sealed(file) for file in rescued.files]) as recalled:
            check_fits(parts, recalled, may_be_done=may_be_done)
            restore_state(parts, recalled)
    except CheckpointError as error:
        return Read(refusal=(error.what, error.fix))
    except SlotError as error:
        return Read(problem=str(error))
    except OSError as error:
        return Read(problem=f"it cannot be read ({error.strerror})")
    return Read(recalled)

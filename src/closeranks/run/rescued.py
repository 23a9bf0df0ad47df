"""Can a run go on from what hosts wrote down that had lost their lead?

Invariant: every byte of it is checked when it is read; what cannot be read on one rank is passed over by all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from closeranks.capture.slots import Sealed, SlotError
from closeranks.core.errors import CheckpointError
from closeranks.elastic.recalling import Recalled
from closeranks.parallel.group import Group
from closeranks.run.rescued_files import Rescued, find_rescued
from closeranks.run.saved_tree import sound_tree
from closeranks.run.state import State


def share_rescued(group: Group, run: Path) -> Rescued | None:
    """Rank 0 looks, so that all ranks try the same."""
    found = find_rescued(run) if group.rank == 0 else None
    text = json.dumps([found.step, found.folder, found.files]) if found is not None else ""
    if not (text := group.share_text(text)):
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


def read_rescued(state: State, rescued: Rescued, *, may_be_done: bool) -> Read:
    """Into the run. Never raises for what it finds: some ranks may see more of a state than others."""
    try:
        with Recalled([Sealed(file) for file in rescued.files]) as recalled:
            try:
                sound_tree(recalled.tree, rescued.folder)
            except CheckpointError as error:
                return Read(problem=error.what)
            state.check(recalled, may_be_done=may_be_done)
            state.restore(recalled)
    except CheckpointError as error:
        return Read(refusal=(error.what, error.fix))
    except SlotError as error:
        return Read(problem=str(error))
    except OSError as error:
        return Read(problem=f"it cannot be read ({error.strerror})")
    return Read(recalled)

"""Restores a run from rescued snapshots: those that hosts wrote to disk after they had lost the job's leader.

Invariant: every byte is checked when it is read; a state that one rank cannot read is skipped by all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from closeranks.capture.slots import SealedSlot, SlotError
from closeranks.core.errors import CheckpointError
from closeranks.elastic.snapshot_reader import SnapshotReader
from closeranks.parallel.process_group import RankGroup
from closeranks.run.state.rescued_files import RescuedState, find_rescued
from closeranks.run.state.saved_tree import validate_tree
from closeranks.run.state.state import RunState


def broadcast_rescued(group: RankGroup, run: Path) -> RescuedState | None:
    """Collective. Rank 0 looks and broadcasts, so that all ranks try the same state."""
    found = find_rescued(run) if group.rank == 0 else None
    text = json.dumps([found.step, found.folder, found.files]) if found is not None else ""
    if not (text := group.broadcast_text(text)):
        return None
    step, folder, files = json.loads(text)
    return RescuedState(step, folder, tuple(files))


@dataclass(frozen=True, slots=True)
class RescueOutcome:
    """The outcome on one rank."""

    reader: SnapshotReader | None = None
    problem: str = ""
    refusal: tuple[str, str] | None = None
    """Why the state does not fit the job, and what to do."""


def restore_rescued(state: RunState, rescued: RescuedState, *, may_be_done: bool) -> RescueOutcome:
    """Restore the run from it. Never raises for a bad state: ranks may see different parts of it and agree first."""
    try:
        with SnapshotReader([SealedSlot(file) for file in rescued.files]) as reader:
            try:
                validate_tree(reader.tree, rescued.folder)
            except CheckpointError as error:
                return RescueOutcome(problem=error.what)
            state.check(reader, may_be_done=may_be_done)
            state.restore(reader)
    except CheckpointError as error:
        return RescueOutcome(refusal=(error.what, error.fix))
    except SlotError as error:
        return RescueOutcome(problem=str(error))
    except OSError as error:
        return RescueOutcome(problem=f"it cannot be read ({error.strerror})")
    return RescueOutcome(reader)

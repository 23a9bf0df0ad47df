"""Resumes a run from its newest sound checkpoint.

That is the newest that every rank can read completely, or a newer rescued state, written by hosts that had lost the
job's leader. A torn, corrupt or missing checkpoint is skipped by all ranks together, with a warning, for the one before
it; a state that does not fit the job (another model, other data) is refused at once. Invariant: after ``resume`` all
ranks hold the state of the same step, or all of them raised.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from closeranks.checkpoint.format.manifest import parse_folder
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.errors import CheckpointError
from closeranks.run.builder.context import RunContext
from closeranks.run.state.initial_weights import load_weights
from closeranks.run.state.restore_rescued import RescueOutcome, broadcast_rescued, restore_rescued
from closeranks.run.state.saved_tree import validate_tree
from closeranks.run.state.session_checkpoints import AUTO, StartPoint, checkpoint_place
from closeranks.run.state.state import RunState
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import StorageError


def load_initial_state(context: RunContext, state: RunState, folder: Path) -> StartPoint:
    """Load the state that the job starts from: a checkpoint's, or a fresh one with the weights that the job names."""
    start_point = resume(context, state, folder) or StartPoint()
    weights = context.job.checkpoint.weights
    if weights and not start_point.path:
        opened = open_weights(weights)
        start_point = StartPoint(path=opened.path, notes=load_weights(state.model, context.groups.pipeline, opened))
        state.weights_loaded()
    return replace(start_point, notes=(*start_point.notes, *state.model.unsaved_warnings()))


def resume(context: RunContext, state: RunState, folder: Path) -> StartPoint | None:
    """Restore the state that ``checkpoint.resume`` names. None: there is none and the job allows that."""
    config = context.job.checkpoint
    if not config.resume:
        return None
    is_auto = config.resume == AUTO  # a scheduler may run the job again, even after its end
    place = checkpoint_place(context.job, folder) if is_auto else config.resume
    candidates = _share_candidates(context, place, config.remote)
    skipped: list[str] = []
    found = _rescued(context, state, folder if is_auto else Path(place), candidates, skipped, may_be_done=is_auto)
    found = found or _first_sound(context, state, candidates, skipped, may_be_done=is_auto)
    if found is not None or (is_auto and not candidates and not skipped):
        return found
    which = "valid checkpoint" if candidates else "checkpoint"
    raise CheckpointError(
        f"there is no {which} at {place}" + "".join(f"; {text}" for text in skipped),
        "Name a run folder or a checkpoint of an earlier run.",
    )


def resume_own_checkpoint(
    context: RunContext, state: RunState, folder: Path, first_attempt: int, skipped: list[str]
) -> StartPoint | None:
    """The newest sound checkpoint among those that this run itself has saved, from ``first_attempt`` on; None if there
    is none. Notes about checkpoints that were skipped are appended to ``skipped``."""
    candidates = _share_candidates(
        context, checkpoint_place(context.job, folder), context.job.checkpoint.remote, first_attempt
    )
    return _first_sound(context, state, candidates, skipped, may_be_done=True)


def _first_sound(
    context: RunContext,
    state: RunState,
    candidates: Sequence[tuple[str, str]],
    skipped: list[str],
    *,
    may_be_done: bool,
) -> StartPoint | None:
    for url, name in candidates:
        found = _try(state, url, name, may_be_done=may_be_done)
        reasons = _gather_reasons(context, found)
        if not reasons:
            assert found.reader is not None
            return StartPoint(found.step, found.reader.path, found.reader.tree, tuple(skipped))
        skipped.append(f"{name} was skipped: {reasons[0]}")
    return None


def _rescued(
    context: RunContext,
    state: RunState,
    run: Path,
    candidates: Sequence[tuple[str, str]],
    skipped: list[str],
    *,
    may_be_done: bool,
) -> StartPoint | None:
    """The rescued state, if it is newer than every checkpoint."""
    rescued = broadcast_rescued(context.groups.world, run)
    newest = max((step for _, name in candidates for step, _ in [parse_folder(name) or (0, 0)]), default=-1)
    if rescued is None or rescued.step <= newest:
        return None
    outcome = restore_rescued(state, rescued, may_be_done=may_be_done)
    reasons = _gather_reasons(context, outcome)
    if not reasons:
        assert outcome.reader is not None
        return StartPoint(rescued.step, rescued.folder, outcome.reader.tree, is_rescued=True)
    skipped.append(f"{rescued.folder} was skipped: {reasons[0]}")
    return None


def _gather_reasons(context: RunContext, found: _Attempt | RescueOutcome) -> list[str]:
    """Collective. The reasons why any rank could not read the state. If it does not fit the job on any rank, every rank
    raises that error."""
    gathered = [
        json.loads(text) for text in context.groups.world.all_gather_text(json.dumps([found.problem, found.refusal]))
    ]
    refusals = [refusal for _, refusal in gathered if refusal]
    if refusals:
        raise CheckpointError(*refusals[0])
    return [problem for problem, _ in gathered if problem]


def _share_candidates(context: RunContext, place: str, remote: str, first_attempt: int = 0) -> list[tuple[str, str]]:
    """Collective. Rank 0 looks and broadcasts, so that all ranks try the same checkpoints in the same order."""
    text = ""
    if context.world.is_lead:
        also = [remote] if remote else []
        found = [one for one in find_checkpoints(place, also).candidates() if one.attempt >= first_attempt]
        text = json.dumps([(one.storage.url, one.name) for one in found])
    shared: list[tuple[str, str]] = json.loads(context.groups.world.broadcast_text(text))
    return shared


@dataclass(frozen=True, slots=True)
class _Attempt:
    reader: CheckpointReader | None
    step: int
    problem: str
    """What is damaged; empty if nothing is."""
    refusal: tuple[str, str] | None = None
    """Why the state does not fit the job, and what to do."""


def _try(state: RunState, url: str, name: str, *, may_be_done: bool) -> _Attempt:
    """Never raises for a bad state: ranks may see different parts of it and must agree first."""
    try:
        reader = CheckpointReader(open_storage(url), name)
        validate_tree(reader.tree, reader.path)
    except (CheckpointError, StorageError) as error:
        return _Attempt(None, 0, _sentence(error))
    try:
        step = state.check(reader, may_be_done=may_be_done)
    except CheckpointError as error:
        return _Attempt(reader, 0, "", (error.what, error.fix))
    try:
        reader.check_files()
        state.restore(reader)
    except (CheckpointError, StorageError) as error:
        return _Attempt(reader, step, _sentence(error))
    return _Attempt(reader, step, "")


def _sentence(error: CheckpointError | StorageError) -> str:
    return error.what if isinstance(error, CheckpointError) else str(error)

"""Reads what a run recorded, and compares two runs.

Imports no torch unless numbers are compared within a tolerance. Invariant: every step counts once, as it was last
recorded; bits are compared, not printed numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.checkpoint.format.manifest import CheckpointManifest
from closeranks.checkpoint.load.catalogue import FoundCheckpoint
from closeranks.checkpoint.load.manifest_diff import diff_manifests, tree_differences
from closeranks.core.errors import CheckpointError
from closeranks.core.events import SaveFailed, StepDone
from closeranks.run.state.checkpoint_lookup import pick_checkpoint
from closeranks.telemetry.run_log.fault_history import TimedEvent
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import agent_events, load_history
from closeranks.telemetry.run_log.sample_log import read_samples

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""How much a run may differ from one with another number of workers, which sums in another order."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run, as it recorded itself."""

    losses: Mapping[int, float]
    """By step."""
    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Which samples each step took, in order; empty if that was not recorded."""
    events: Sequence[TimedEvent] = ()
    """Events of the agent, and saves that failed."""
    last_step: int = 0
    longest_s: float = 0.0
    """Duration of the longest step, first steps included."""
    ended_at: float = 0.0
    """``time.time()`` when the last step was reported."""


def read_recorded_run(folder: Path) -> RecordedRun:
    run, history = RunFolder(folder), load_history(folder, all_steps=True)
    steps = history.steps
    return RecordedRun(
        losses={step.step: step.loss for step in steps},
        samples=_samples(folder),
        events=sorted([*agent_events(run), *_failed_saves(run)], key=lambda line: line.at),
        last_step=history.started.last_step if history.started else 0,
        longest_s=max((step.seconds for step in steps), default=0.0),
        ended_at=_last_step_at(run),
    )


def _failed_saves(run: RunFolder) -> list[TimedEvent]:
    return [line for line in _events(run) if isinstance(line.event, SaveFailed)]


def _last_step_at(run: RunFolder) -> float:
    return max((line.at for line in _events(run) if isinstance(line.event, StepDone)), default=0.0)


def _events(run: RunFolder) -> list[TimedEvent]:
    """Events recorded by rank 0."""
    lines = read_events(run.metrics(0)) if run.metrics(0).exists() else ()
    return [TimedEvent(float(values["at"]), event) for values, event in lines]


def _samples(folder: Path) -> dict[int, tuple[int, ...]]:
    log = read_samples(folder)
    return {step: log.samples_of(step) for step in log.steps}


def same_losses(one: RecordedRun, other: RecordedRun, first: int, last: int, tolerance: float = 0.0) -> bool:
    """Whether the losses of all steps from ``first`` to ``last`` are equal: in every bit, or within a tolerance."""
    for step in range(first, last + 1):
        a, b = one.losses.get(step), other.losses.get(step)
        if a is None or b is None:
            return False
        is_near = tolerance > 0 and abs(a - b) <= tolerance * max(abs(a), abs(b))
        if _bits(a) != _bits(b) and not is_near:
            return False
    return True


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def state_difference(one: Path, other: Path, tolerance: float = 0.0) -> str:
    """How the last states of two runs differ, in words; empty if they are equal."""
    try:
        (a, first), (b, second) = pick_checkpoint(str(one)), pick_checkpoint(str(other))
    except CheckpointError as error:
        return f"the last states cannot be compared: {error.what}"
    rows = [row for row in diff_manifests(first, second) if row.verdict != "equal"]
    if tolerance > 0:
        rows = [row for row in rows if row.verdict != "differs" or not _is_near(a, b, row.section, row.key, tolerance)]
    if rows:
        return f"{len(rows)} tensors of the last state differ, {rows[0].section}/{rows[0].key} the first of them"
    trees = tree_differences(_training_state(first), _training_state(second))
    return f"the last states differ in {trees[0]}" if trees else ""


def _training_state(manifest: CheckpointManifest) -> dict[str, Any]:
    """The state that training continues from, without the settings, the length of the run and the times of saves."""
    kept = {key: value for key, value in manifest.tree.items() if key not in ("config", "rhythm")}
    return {**kept, "schedule": {**kept.get("schedule", {}), "num_steps": None}}


def _is_near(a: FoundCheckpoint, b: FoundCheckpoint, section: str, key: str, tolerance: float) -> bool:
    """By the largest absolute difference: near zero, a large relative difference means nothing."""
    from closeranks.checkpoint.load.resharding_reader import CheckpointReader
    from closeranks.checkpoint.load.value_diff import largest_difference

    found = largest_difference(CheckpointReader(a.storage, a.name), CheckpointReader(b.storage, b.name), section, key)
    return found.absolute <= tolerance


def same_samples(one: RecordedRun, other: RecordedRun) -> bool | None:
    """Whether every step took the same samples; None if neither run recorded them."""
    if not one.samples and not other.samples:
        return None
    return one.samples == other.samples

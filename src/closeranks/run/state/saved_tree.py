"""Validates the values of a saved state that are not tensors before anything uses them.

A digest proves that a checkpoint was not damaged by accident, not that its writer was correct. Invariant: after
``validate_tree`` every value that this package reads from a tree has the right type and range; unknown keys are
ignored, so that a state of a later version can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from closeranks.core.errors import CheckpointError, ModelError
from closeranks.core.printable import printable
from closeranks.run.job.job import Job

_FIX = "Use an earlier checkpoint."
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=-1e15, le=1e15)]


class _Values(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Progress(_Values):
    step: _Count
    position: _Count


class _BadSample(_Values):
    sample: _Count
    place: str
    reason: str


class _Data(_Values):
    quarantine: list[_BadSample] = []
    shares: list[_Count] = []
    returned: list[Annotated[list[_Count], Field(min_length=4, max_length=4)]] = []


class _Noise(_Values):
    signal: float = 0.0
    spread: float = 0.0


class _SaveHistory(_Values):
    """``checkpoint.save.save_schedule.SaveHistory``."""

    uptime_s: _Seconds = 0.0
    num_faults: _Count = 0
    stall_s: _Seconds = 0.0
    durable_s: _Seconds = 0.0
    drag_s: _Seconds = 0.0
    num_saves: _Count = 0
    is_ending: bool = False


class _Tables(_Values):
    rule: str
    names: list[str]
    """A table's number in the keys of rows is its place here."""
    widths: list[_Count]


class _Tree(_Values):
    progress: _Progress | None = None
    """None in a checkpoint that holds weights alone."""
    identity: dict[str, Any] | None = None
    algorithm: str = ""
    data: _Data = _Data()
    noise: _Noise = _Noise()
    tables: _Tables | None = None
    rhythm: _SaveHistory | None = None
    every: Annotated[int, Field(ge=1, lt=2**63)] = 1
    last: str = ""
    config: dict[str, Any] | None = None
    hub: dict[str, Any] | None = None


def validate_tree(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Returns the tree itself. ``path``: of the checkpoint, for the error."""
    try:
        _Tree.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        value = printable(repr(first["input"]))[:80]
        what = f"{path} is damaged or invalid: {'.'.join(map(str, first['loc']))} of its state cannot be {value}"
        raise CheckpointError(printable(what), _FIX) from None
    return tree


def load_saved_job(tree: Mapping[str, Any], path: str) -> Job:
    """The job that saved a state. Nothing that it names is imported."""
    config = validate_tree(tree, path).get("config")
    if config is None:
        raise ModelError(f"{path} does not say which job saved it", "Name a run that `closeranks train` made.")
    try:
        return Job.model_validate(config)
    except (ValidationError, ValueError, TypeError) as error:
        what = f"the job of {path} is damaged, or of another version of this program"
        raise CheckpointError(what, _FIX) from error

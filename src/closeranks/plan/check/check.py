"""How near did a plan come to the run that followed it? Predicted beside measured, part by part. Pure.

Invariant: only what both know is compared; what one of them does not know is left out, never taken for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.plan.check.measured_step import (
    COMPUTE,
    DATA_AXIS,
    GROUPS,
    INPUT,
    OPTIMIZER,
    OVERHEAD,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    StepGroups,
)

_NOTICED = 0.05
"""Of a step: a smaller difference is not worth a sentence."""
_MEASURED_BY_CALIBRATION = frozenset({COMPUTE, TENSOR_AXIS, DATA_AXIS, OPTIMIZER, OVERHEAD})


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """One figure: a time in seconds, or a size in bytes."""

    name: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        return self.measured - self.predicted

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured; None where nothing was."""
        return self.predicted / self.measured - 1 if self.measured > 0 else None


@dataclass(frozen=True, slots=True)
class PlanCheck:
    step: CheckedFigure
    parts: tuple[CheckedFigure, ...]
    """Of the step; those of which both sides have nothing are left out."""
    unplanned: Mapping[str, float]
    """Seconds of a step that no plan contains, by phase."""
    memory: tuple[CheckedFigure, ...] = ()
    traffic: tuple[CheckedFigure, ...] = ()
    """Bytes that a rank sends in a step, by axis."""
    is_calibrated: bool = False
    is_one_host: bool = True
    notes: tuple[str, ...] = ()
    """What the run did that no plan contains."""

    @property
    def largest(self) -> CheckedFigure:
        return max(self.parts, key=lambda part: abs(part.difference))

    def sentence(self) -> str:
        """What differs most, and whether measuring this machine would help."""
        part = self.largest
        share = abs(part.difference) / self.step.measured
        if share < _NOTICED:
            return f"No part differs by more than {_NOTICED:.0%} of a step."
        way = "longer" if part.difference > 0 else "shorter"
        said = f"The largest difference is {part.name}: {share:.0%} of a step {way} than predicted"
        return f"{said}{self._advice(part)}"

    def _advice(self, part: CheckedFigure) -> str:
        if part.name == PIPELINE_AXIS:
            return ", where stages that are not even wait, too; closeranks doctor says which rank is slow."
        if part.name == INPUT:
            return ": no plan knows how fast your data loads; closeranks doctor says what would help."
        if self.is_calibrated:
            return ", although it rests on a calibration: was the machine as quiet as when it was calibrated?"
        if part.name in (DATA_AXIS, TENSOR_AXIS) and not self.is_one_host:
            return ": name the links between your hosts in a cluster file, since calibrate measures inside a host."
        if part.name in _MEASURED_BY_CALIBRATION:
            return ". The plan rests on a datasheet: closeranks plan calibrate JOB.toml measures this on your machine."
        return "."


def check_plan(
    planned: Mapping[str, float],
    measured: StepGroups,
    *,
    memory: tuple[CheckedFigure, ...] = (),
    traffic: tuple[CheckedFigure, ...] = (),
    is_calibrated: bool = False,
    is_one_host: bool = True,
    notes: tuple[str, ...] = (),
) -> PlanCheck:
    """``planned``: seconds by group."""
    parts = tuple(CheckedFigure(name, planned[name], measured.groups[name]) for name in GROUPS)
    return PlanCheck(
        CheckedFigure("step", sum(planned.values()), measured.seconds),
        tuple(part for part in parts if part.predicted or part.measured),
        measured.unplanned,
        memory,
        traffic,
        is_calibrated,
        is_one_host,
        notes,
    )


def check_json(check: PlanCheck) -> dict[str, Any]:
    """Seconds and bytes."""

    def figures(rows: tuple[CheckedFigure, ...]) -> list[dict[str, Any]]:
        return [
            {"name": row.name, "predicted": row.predicted, "measured": row.measured, "error": row.error} for row in rows
        ]

    return {
        "step_s": figures((check.step,))[0],
        "parts_s": figures(check.parts),
        "unplanned_s": dict(check.unplanned),
        "memory_bytes": figures(check.memory),
        "sent_bytes": figures(check.traffic),
        "is_calibrated": check.is_calibrated,
        "notes": list(check.notes),
        "says": check.sentence(),
    }


def check_rows(check: PlanCheck) -> list[tuple[str, str, str, str]]:
    """A table for people: name, predicted, measured, error."""
    rows = [_time_row(part) for part in (*check.parts, check.step)]
    rows += [(f"memory: {row.name}", *_sizes(row)) for row in check.memory]
    rows += [(f"sent in a step: {row.name}", *_sizes(row)) for row in check.traffic]
    return rows


def _time_row(row: CheckedFigure) -> tuple[str, str, str, str]:
    return row.name, _milliseconds(row.predicted), _milliseconds(row.measured), _error(row)


def _sizes(row: CheckedFigure) -> tuple[str, str, str]:
    return f"{row.predicted / 2**20:,.1f} MiB", f"{row.measured / 2**20:,.1f} MiB", _error(row)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _error(row: CheckedFigure) -> str:
    return "-" if row.error is None else f"{row.error:+.1%}"

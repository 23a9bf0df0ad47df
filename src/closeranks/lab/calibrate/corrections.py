"""What do whole steps take beyond their operations measured alone? Fits a calibration to steps that were trained. Pure.

Forward and backward of a run are its products and attention, its memory-bound operations, each times a factor, and a
fixed time for each micro-batch. There are few runs, so factors are held near 1, and the fixed time near that of
dispatching the operations of the blocks. What a worker with all cores gains by its threads is taken from its own run.
Invariant: without runs a calibration stays as it is; nothing that is fitted is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import Cluster
from closeranks.plan.check.measured_step import (
    COMPUTE,
    DATA_AXIS,
    INPUT,
    OPTIMIZER,
    OVERHEAD,
    TENSOR_AXIS,
    StepGroups,
)
from closeranks.plan.step_time import measured_times as names
from closeranks.plan.step_time.estimate import StepEstimate, estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

_LATITUDE = {"products": 0.15, "memory": 2.0, "micro": 2.0}
"""How far each may lie from what is expected, as a share of it."""
_BLOCK_OPERATIONS = 200
"""Operations of a block, forward and backward: what each costs before it computes is the expected fixed time."""
_MANY_OPERATIONS_S = 2e-3
"""The same for a block, where dispatch was not measured."""
_NOISE = 0.02
"""Of the measured forward and backward of a run."""
_COMMUNICATION_NOISE = 0.1
_SHOWN, _WAITING = 0.2, 0.05
"""How far the share of communication that shows may lie from 1, and that of waiting from 0."""


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """A run of a few steps: what was planned, and what was measured."""

    workload: Workload
    choice: PlanChoice
    cluster: Cluster
    measured: StepGroups

    @property
    def num_micro(self) -> int:
        return self.choice.num_micro(self.workload.global_batch)

    def estimate(self, calibration: Calibration) -> StepEstimate:
        return estimate_step(self.workload, self.choice, self.cluster, calibration)


def corrected(calibration: Calibration, runs: Sequence[TrainedSteps]) -> Calibration:
    if not runs:
        return calibration
    plain = replace(calibration, corrections={}, wait_share=0.0, step_overhead_s=0.0, micro_batch_overhead_s=0.0)
    found = [_Compared.of(run, plain) for run in runs]
    dispatch_s = _BLOCK_OPERATIONS * plain.op_overhead_s if plain.op_overhead_s else _MANY_OPERATIONS_S
    whole = [one for one in found if one.run.choice.layout.tensor == 1]
    several = [one for one in whole if one.run.cluster.num_devices > 1]
    products, memory, micro_s = _computation(several or whole or found, dispatch_s * runs[0].workload.num_blocks)
    corrections = {names.PRODUCTS: products, names.ATTENTION: products, **memory}
    corrections |= _ratio(several or found, names.OPTIMIZER, OPTIMIZER)
    data, wait_share = _data_axis(found)
    step_s = fmean((one.run.measured.groups[OVERHEAD] + one.run.measured.groups[INPUT]) / one.slowdown for one in found)
    fitted = replace(
        plain,
        corrections=corrections | data,
        wait_share=wait_share,
        step_overhead_s=step_s,
        micro_batch_overhead_s=micro_s,
    )
    if several:
        fitted = _with_threads(fitted, [one.run for one in whole if one.run.cluster.num_devices == 1])
    return _with_tensor(fitted, [one.run for one in found if one.run.choice.layout.tensor > 1])


def _data_axis(found: Sequence[_Compared]) -> tuple[dict[str, float], float]:
    """How much of the estimated communication shows, and the share of their computation that ranks wait for the last
    of them."""
    rows, wanted = [[1 / _SHOWN, 0.0], [0.0, 1 / _WAITING]], [1 / _SHOWN, 0.0]
    for one in found:
        measured, groups = one.run.measured.groups[DATA_AXIS], one.run.measured.groups
        if one.parts[names.DATA] > 0 and measured > 0:
            weight = 1 / (_COMMUNICATION_NOISE * measured)
            rows.append([weight * one.parts[names.DATA], weight * (groups[COMPUTE] + groups[TENSOR_AXIS])])
            wanted.append(weight * measured)
    if not wanted[2:]:
        return {}, 0.0
    shown, waiting = _not_negative(np.array(rows), np.array(wanted))
    return {names.DATA: float(shown)}, float(waiting)


def _with_threads(calibration: Calibration, runs: Sequence[TrainedSteps]) -> Calibration:
    """A worker that has all cores computes with many threads: most operations of a step are too small for them to gain
    what one large product gains."""
    measured_s = estimated_s = 0.0
    for run in runs:
        parts = {part.name: part.seconds for part in run.estimate(calibration).parts}
        estimated = sum(parts[name] for name in (names.PRODUCTS, names.ATTENTION, names.MEMORY_BOUND, "recompute"))
        measured = run.measured.groups[COMPUTE]
        measured_s += max(measured - parts["loss"] - parts["launches"], measured / 4)
        estimated_s += estimated
    if not estimated_s:
        return calibration
    factor = measured_s / estimated_s
    slowdowns = tuple(
        replace(one, products=factor * one.products, memory=factor * one.memory) if one.num_workers == 1 else one
        for one in calibration.slowdowns
    )
    return replace(calibration, slowdowns=slowdowns)


def _with_tensor(calibration: Calibration, runs: Sequence[TrainedSteps]) -> Calibration:
    """What a split model computes longer than its shapes say is split and put together again: it counts as
    communication."""
    measured_s = estimated_s = 0.0
    for run in runs:
        parts = {part.name: part.seconds for part in run.estimate(calibration).parts}
        communication = parts["tensor communication"]
        measured_s += max(0.0, run.measured.seconds - sum(parts.values()) + communication)
        estimated_s += communication / calibration.correction(names.TENSOR)
    if not estimated_s:
        return calibration
    return replace(calibration, corrections={**calibration.corrections, names.TENSOR: measured_s / estimated_s})


@dataclass(frozen=True, slots=True)
class _Compared:
    run: TrainedSteps
    parts: Mapping[str, float]
    slowdown: float
    """Of overheads, beside the other workers of the host."""

    @classmethod
    def of(cls, run: TrainedSteps, calibration: Calibration) -> _Compared:
        parts = {part.name: part.seconds for part in run.estimate(calibration).parts}
        return cls(run, parts, calibration.crowding(run.cluster.devices_on_host))


def _computation(found: Sequence[_Compared], expected_s: float) -> tuple[float, dict[str, float], float]:
    """Factors of products with attention and of memory-bound operations, and seconds of a micro-batch: those that are
    likeliest given the runs, by least squares. ``expected_s``: of a micro-batch, without any run."""
    kinds = sorted({one.run.choice.compiled for one in found})
    rows, wanted = [], []
    for one in found:
        measured = one.run.measured.groups[COMPUTE]
        moved = one.parts["compute: memory-bound"]
        # Of what is computed again, both kinds of operations have their share.
        repeated = one.parts["recompute"]
        computed = one.parts["compute: products"] + one.parts["compute: attention"]
        share = computed / (computed + moved) if computed + moved else 0.0
        row = [computed + share * repeated]
        row += [(moved + (1 - share) * repeated) * (kind == one.run.choice.compiled) for kind in kinds]
        row += [one.run.num_micro * one.slowdown * expected_s]
        weight = 1 / (_NOISE * measured)
        rows.append([weight * value for value in row])
        wanted.append(weight * (measured - one.parts["loss"]))
    latitude = [_LATITUDE["products"], *[_LATITUDE["memory"]] * len(kinds), _LATITUDE["micro"]]
    for place, by in enumerate(latitude):
        rows.append([1 / by if column == place else 0.0 for column in range(len(latitude))])
        wanted.append(1 / by)
    solved = _not_negative(np.array(rows), np.array(wanted))
    memory = {
        names.memory_bound_name(is_compiled=kind): float(value) for kind, value in zip(kinds, solved[1:-1], strict=True)
    }
    return float(solved[0]), memory, float(solved[-1]) * expected_s


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares; what would be negative is 0, and the rest solved again."""
    free = np.ones(rows.shape[1], dtype=bool)
    while True:
        solved = np.zeros(rows.shape[1])
        solved[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        if (solved >= 0).all():
            return solved
        free &= solved > 0


def _ratio(found: Sequence[_Compared], name: str, group: str) -> dict[str, float]:
    """Measured over estimated, in all runs that have it."""
    measured = [one.run.measured.groups[group] for one in found if one.parts[name] > 0]
    return {name: sum(measured) / sum(one.parts[name] for one in found)} if measured else {}

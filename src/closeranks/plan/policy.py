"""Computes how a given job should save: how often, where to, at what cost, and what other strategies would cost.

Pure: a scenario in, a policy out; ``cli`` prints it and ``policy_picture`` draws it. The model is that of
``facts.checkpoint_policy``. Invariant: every alternative is judged in the same scenario by the same formulas, and the
policy's table contains only keys of a job file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from closeranks.facts.checkpoint_policy.multilevel import MultilevelSchedule, best_multilevel_schedule
from closeranks.facts.checkpoint_policy.preemption_hazard import AgeInterval, age_gain, ages_of
from closeranks.facts.checkpoint_policy.save_interval import (
    CheckpointLevel,
    best_period_s,
    daly_period_s,
    efficiency_without_saves,
    lost_s,
    storage_cost,
    waste,
)
from closeranks.facts.checkpoint_policy.storage_contention import SharedStorage, contended_period_s
from closeranks.facts.durations import duration_literal, format_duration

HOUR_S = 3600.0
LOCAL, STORE, DISK = "local disk", "store", "disk"
MAX_AUTO_S = 1800.0
"""The longest interval of ``every = "auto"``; a longer one is written out."""
COMPARED_JOBS = (1, 4, 16, 64)
NOTICES_S = (30.0, 120.0)
"""Warning that preemptible machines get before they are stopped, at two large clouds."""
_QUARTER_S = 900.0
_TIMEOUT_S = 600.0
"""The default of ``timeout_s``, which is kept if four saves fit into it."""


@dataclass(frozen=True, slots=True)
class CheckpointScenario:
    """A job and the machines it runs on."""

    mtbf_s: float = 3 * HOUR_S
    """Mean time between failures of any kind."""
    length_s: float = 24 * HOUR_S
    """Work to be done."""
    step_s: float = 1.0
    state_bytes: float = 14e9
    stall_s: float = 0.05
    """How long a save stalls training."""
    durable_s: float = 14 / 1.5
    """Until a save is durable in the nearest place."""
    restart_s: float = 60.0
    """From a failure until training resumes: detecting it, starting, loading."""
    remote_bytes_per_s: float = 0.5e9
    """Bandwidth for one job of the store that outlives machines; 0: the job saves to one place only."""
    num_jobs: int = 1
    """Number of such jobs that share the store (or the only place there is)."""
    machine_loss: float = 0.25
    """Share of failures after which the local disk is gone."""
    drag: float = 0.01
    """Share of its speed that training loses while a save is written."""
    price: float = 0.023
    """Per GB and month."""
    keep_last: int = 3
    is_preemptible: bool = True

    @property
    def has_store(self) -> bool:
        return self.remote_bytes_per_s > 0 and self.machine_loss > 0

    @property
    def transfer_s(self) -> float:
        """Duration of one save to the shared place, without other jobs."""
        return self.state_bytes / self.remote_bytes_per_s if self.has_store else self.durable_s


@dataclass(frozen=True, slots=True)
class SaveStrategy:
    """A way to save, and what it costs."""

    name: str
    period_s: float
    """Work between saves; infinite: no saves."""
    waste: float
    lost_s: float
    """Work redone per failure."""
    takes_s: float
    """Expected wall-clock time of the whole job; infinite if it never ends."""
    num_saves: float


@dataclass(frozen=True, slots=True)
class ContentionEstimate:
    """What it costs if this many jobs share one store."""

    num_jobs: int
    period_s: float
    """Between one job's saves to the store."""
    load: float
    random_s: float
    aligned_s: float
    waste: float
    aligned_waste: float


@dataclass(frozen=True, slots=True)
class StorageCost:
    """What is written to one place and kept there over the job."""

    name: str
    num_saves: float
    written_bytes: float
    kept_bytes: float
    cost: float
    """Of keeping it while the job runs; 0 for a disk that comes with the machine."""
    monthly_cost: float
    """Of leaving it there afterwards."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    situation: CheckpointScenario
    nesting: MultilevelSchedule
    lost_s: float
    """Work redone per failure, over all kinds of failures."""
    habits: tuple[SaveStrategy, ...]
    """The recommended one last."""
    storage: tuple[StorageCost, ...]
    crowds: tuple[ContentionEstimate, ...]
    ages: tuple[AgeInterval, ...]
    """Empty if machines are not preemptible."""
    age_gain: float
    """Share of the cost of saving and redoing that adapting to the machines' age would save."""

    @property
    def waste(self) -> float:
        return self.nesting.waste


def policy_for(scenario: CheckpointScenario) -> CheckpointPolicy:
    schedule = multilevel_schedule_for(scenario)
    first = schedule.placed[0].level
    ages = ages_of(scenario.mtbf_s, first.stall_s, first.floor_s) if scenario.is_preemptible else ()
    return CheckpointPolicy(
        situation=scenario,
        nesting=schedule,
        lost_s=_lost_s(schedule),
        habits=_strategies(scenario, schedule),
        storage=_storage(scenario, schedule),
        crowds=tuple(_contention(scenario, num_jobs) for num_jobs in sorted({*COMPARED_JOBS, scenario.num_jobs})),
        ages=ages,
        age_gain=age_gain() if ages else 0.0,
    )


def checkpoint_levels(scenario: CheckpointScenario, store_s: float | None = None) -> list[CheckpointLevel]:
    """The places of a job, nearest first; ``store_s``: duration of a save to the shared one, if not alone."""
    transfer_s, num_jobs = scenario.transfer_s, scenario.num_jobs
    save_s = transfer_s if store_s is None else store_s
    shared = CheckpointLevel(
        name=STORE if scenario.has_store else DISK,
        mtbf_s=scenario.mtbf_s / (scenario.machine_loss if scenario.has_store else 1.0),
        stall_s=scenario.drag * transfer_s,
        durable_s=save_s,
        restart_s=scenario.restart_s,
        least_s=contended_period_s(transfer_s, num_jobs),
    )
    if not scenario.has_store:
        return [shared]
    kept_share = 1 - scenario.machine_loss
    local = CheckpointLevel(
        name=LOCAL,
        mtbf_s=scenario.mtbf_s / kept_share if kept_share else math.inf,
        stall_s=scenario.drag * scenario.durable_s,
        durable_s=scenario.durable_s,
        restart_s=scenario.restart_s,
    )
    # The store is written from the finished file on the local disk.
    return [local, replace(shared, durable_s=scenario.durable_s + save_s)]


def multilevel_schedule_for(scenario: CheckpointScenario) -> MultilevelSchedule:
    """The duration of a save to a shared store and the interval depend on each other: solved in two iterations."""
    last = checkpoint_levels(scenario)[-1]
    period_s = max(daly_period_s(last.mtbf_s, last.stall_s), last.least_s)
    for _ in range(2):
        storage = SharedStorage(scenario.transfer_s, scenario.num_jobs, period_s)
        schedule = best_multilevel_schedule(checkpoint_levels(scenario, storage.random_s), copy_s=scenario.stall_s)
        period_s = schedule.placed[-1].period_s
    return schedule


def single_level(scenario: CheckpointScenario, *, is_blocking: bool) -> CheckpointLevel:
    """The only place of a job that saves to a single one, which outlives every failure."""
    level, transfer_s = checkpoint_levels(scenario)[-1], scenario.transfer_s
    stall_s = transfer_s if is_blocking else scenario.stall_s + level.stall_s
    period_s = max(daly_period_s(scenario.mtbf_s, stall_s), level.least_s)
    save_s = SharedStorage(transfer_s, scenario.num_jobs, period_s).random_s
    stall_s = max(stall_s, save_s) if is_blocking else stall_s
    return replace(level, mtbf_s=scenario.mtbf_s, stall_s=stall_s, durable_s=max(save_s, stall_s))


def _lost_s(schedule: MultilevelSchedule) -> float:
    rate = sum(placed.level.rate for placed in schedule.placed)
    return sum(placed.level.rate * lost_s(placed.period_s, placed.level) for placed in schedule.placed) / rate


def _strategies(scenario: CheckpointScenario, schedule: MultilevelSchedule) -> tuple[SaveStrategy, ...]:
    blocking = single_level(scenario, is_blocking=True)
    asynchronous = single_level(scenario, is_blocking=False)
    efficiency = efficiency_without_saves(scenario.length_s, scenario.mtbf_s, scenario.restart_s)
    never_s = scenario.length_s / efficiency if efficiency else math.inf
    life_s = scenario.mtbf_s * (1 - efficiency_without_saves(scenario.length_s, scenario.mtbf_s, 0.0))
    rows = [
        SaveStrategy("never", math.inf, 1 - efficiency, life_s, never_s, 0.0),
        _strategy(scenario, "every 15 min, blocking", _QUARTER_S, blocking),
        _strategy(scenario, "every 15 min", _QUARTER_S, asynchronous),
        _strategy(scenario, "every step", scenario.step_s, asynchronous),
        _strategy(scenario, "best blocking", best_period_s(blocking), blocking),
    ]
    takes_s = scenario.length_s / (1 - schedule.waste) if schedule.waste < 1 else math.inf
    num_saves = scenario.length_s / schedule.period_s
    return (
        *rows,
        SaveStrategy("recommended", schedule.period_s, schedule.waste, _lost_s(schedule), takes_s, num_saves),
    )


def _strategy(scenario: CheckpointScenario, name: str, period_s: float, level: CheckpointLevel) -> SaveStrategy:
    share = waste(period_s, level)
    takes_s = scenario.length_s / (1 - share) if share < 1 else math.inf
    return SaveStrategy(name, period_s, share, lost_s(period_s, level), takes_s, scenario.length_s / period_s)


def _storage(scenario: CheckpointScenario, schedule: MultilevelSchedule) -> tuple[StorageCost, ...]:
    rows = []
    for placed in schedule.placed:
        num_saves = scenario.length_s / placed.period_s
        kept = scenario.state_bytes * min(scenario.keep_last, max(1.0, num_saves))
        price = 0.0 if placed.level.name == LOCAL else scenario.price
        rows.append(
            StorageCost(
                name=placed.level.name,
                num_saves=num_saves,
                written_bytes=scenario.state_bytes * num_saves,
                kept_bytes=kept,
                cost=storage_cost(kept, price, scenario.length_s),
                monthly_cost=storage_cost(kept, price, 730 * HOUR_S),
            )
        )
    return tuple(rows)


def _contention(scenario: CheckpointScenario, num_jobs: int) -> ContentionEstimate:
    shared = replace(scenario, num_jobs=num_jobs)
    schedule = multilevel_schedule_for(shared)
    storage = SharedStorage(scenario.transfer_s, num_jobs, schedule.placed[-1].period_s)
    return ContentionEstimate(
        num_jobs=num_jobs,
        period_s=storage.period_s,
        load=storage.utilization,
        random_s=storage.random_s,
        aligned_s=storage.aligned_s,
        waste=schedule.waste,
        aligned_waste=_aligned(schedule, storage).waste,
    )


def _aligned(schedule: MultilevelSchedule, storage: SharedStorage) -> MultilevelSchedule:
    """The same schedule, if all jobs save at the same instant."""
    *lower, last = schedule.placed
    late_s = storage.aligned_s - storage.random_s
    return replace(
        schedule, placed=(*lower, replace(last, level=replace(last.level, durable_s=last.level.durable_s + late_s)))
    )


def checkpoint_table(policy: CheckpointPolicy) -> str:
    """The policy as ``[checkpoint]``, ready for a job file."""
    scenario, schedule = policy.situation, policy.nesting
    names = [placed.level.name for placed in schedule.placed]
    lines = ["[checkpoint]"]
    if schedule.period_s <= MAX_AUTO_S:
        lines += [_line("every", '"auto"', f"about every {format_duration(schedule.period_s)} here")]
        lines += [_line("mtbf", f'"{duration_literal(scenario.mtbf_s)}"')]
    else:
        lines += [_line("every", f'"{duration_literal(schedule.period_s)}"')]
    if STORE in names and LOCAL not in names:
        lines += [_line("folder", '"s3://BUCKET/RUN"', "straight to the store: a local copy is not worth it")]
    elif STORE in names:
        last = schedule.placed[-1]
        lines += [_line("remote", '"s3://BUCKET/RUN"', "your store")]
        lines += [_line("remote_every", str(last.every), f"about every {format_duration(last.period_s)}")]
    lines += [_line("keep_last", str(scenario.keep_last))]
    slowest_s = max(placed.level.durable_s for placed in schedule.placed)
    if 4 * slowest_s > _TIMEOUT_S:
        lines += [_line("timeout_s", str(math.ceil(4 * slowest_s / 60) * 60))]
    if scenario.is_preemptible:
        lines += [_line("resume", '"auto"', "the same command resumes where it stopped")]
    return "\n".join(lines)


def _line(key: str, value: str, remark: str = "") -> str:
    text = f"{key} = {value}"
    return f"{text:<30} # {remark}" if remark else text

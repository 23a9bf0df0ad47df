"""What is simulated: a run and its hosts (``GoodputScenario``), and what it does about failures (``RecoveryStrategy``).

Invariant: values only; every default that is not measured is said to be assumed in docs/plan-goodput.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from closeranks.facts.checkpoint_policy.save_interval import CheckpointLevel, best_period_s
from closeranks.facts.failures.failure_rates import HANG, SILENT, SLOW, FailureKind, FailureTable
from closeranks.plan.policy import MAX_AUTO_S


@dataclass(frozen=True, slots=True)
class RecoveryStrategy:
    name: str
    from_memory: bool
    """Resumes from the snapshot of the last step, rather than from the last checkpoint."""
    shrinks: bool
    """Trains on with fewer replicas while hosts are missing, rather than waiting for them."""
    crash_s: float
    """Until a worker or host that died is noticed;"""
    hang_s: float
    """one that stands still, at the least;"""
    slow_s: float
    """one that is slow, and is then evicted;"""
    silent_s: float
    """one that computes wrong values."""
    recover_s: float
    """From noticing a failure until training resumes."""
    hang_steps: float = 0.0
    """A hang is noticed after this many steps, if that is longer than ``hang_s``."""
    snapshot_share: float = 0.0
    """What snapshots add to the duration of a step."""
    snapshot_every: int = 1
    """Steps between snapshots."""

    def detection_s(self, kind: FailureKind, step_s: float) -> float:
        """From a failure that stops the run until it is noticed."""
        if kind.shows == HANG:
            return max(self.hang_s, self.hang_steps * step_s)
        return 0.0 if kind.notice_s or kind.shows == SILENT else self.crash_s


CLOSING_RANKS = RecoveryStrategy(
    "closing ranks", from_memory=True, shrinks=True, crash_s=3, hang_s=5, slow_s=600, silent_s=3600, recover_s=15,
    hang_steps=8, snapshot_share=0.01,
)  # fmt: skip
RESTART = RecoveryStrategy(
    "restart", from_memory=False, shrinks=False, crash_s=15, hang_s=600, slow_s=3600, silent_s=3600, recover_s=300
)
STRATEGIES = (CLOSING_RANKS, RESTART)


@dataclass(frozen=True, slots=True)
class GoodputScenario:
    num_devices: int = 1024
    per_host: int = 8
    """Devices of a host, which fail and are replaced together."""
    replica_hosts: int = 1
    """Hosts of one replica: a run shrinks by whole replicas."""
    least_share: float = 0.5
    """A run with fewer of its devices than this waits, even if it could shrink."""
    wall_s: float = 30 * 86400.0
    step_s: float = 5.0
    stall_s: float = 1.0
    """How long a save stalls training,"""
    durable_s: float = 10.0
    """and until it is durable."""
    save_every_s: float = 0.0
    """Work between saves; 0: the best for each strategy, at most half an hour, as ``every = "auto"`` saves."""
    spares: int = 0
    """Hosts that stand by, started and paid for."""
    cold_spares: int = 0
    """Hosts that are started, and paid for, when they are needed,"""
    cold_s: float = 600.0
    """and the time that takes."""

    @property
    def num_hosts(self) -> int:
        return self.num_devices // self.per_host


def stopping_kinds(table: FailureTable) -> tuple[FailureKind, ...]:
    """Failures that stop a run without notice, at once."""
    return tuple(kind for kind in table.kinds if not kind.notice_s and kind.shows not in (SLOW, SILENT))


def save_period_s(scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> float:
    """Work between saves: whole steps, and never more often than a save is durable.

    With snapshots in memory, checkpoints serve failures alone that snapshots do not survive.
    """
    wanted = scenario.save_every_s
    if not wanted:
        silent = tuple(kind for kind in table.kinds if kind.shows == SILENT)
        kinds = silent if strategy.from_memory else (*stopping_kinds(table), *silent)
        mtbf_s = FailureTable(kinds).mtbf_s(scenario.num_devices)
        wanted = min(MAX_AUTO_S, best_period_s(CheckpointLevel("", mtbf_s, scenario.stall_s, scenario.durable_s)))
    wanted = max(wanted, scenario.durable_s - scenario.stall_s)
    step_s = scenario.step_s * (1 + strategy.snapshot_share)
    return max(1, math.ceil(wanted / step_s - 1e-9)) * scenario.step_s


def expected_in_repair(scenario: GoodputScenario, table: FailureTable) -> float:
    """Hosts that are under repair at any time, on average, of a run that always has all its hosts."""
    return scenario.num_devices * sum(kind.per_device_hour * kind.hosts * kind.repair_h for kind in table.kinds)

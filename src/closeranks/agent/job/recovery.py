"""Recovery from one generation to the next.

Keeps the progress of the run, its faults and the placement of its workers, asks the restart policy, and emits the
events. Nothing here touches a process or a connection. Invariants: every report of a fault names one culprit; a fault
during a recovery belongs to the same recovery, whose time counts from the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from closeranks.agent.detection.host_report import HostReport
from closeranks.agent.detection.root_cause import RootCause, external_cause
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.fault_log import FaultLog, steps_done
from closeranks.agent.job.generation_end import find_lost_host, root_cause_of
from closeranks.agent.job.host_table import HostTable
from closeranks.agent.job.placement import HostPlacement, HostState, hosts_by_rank, place_workers, why_quarantined
from closeranks.agent.job.recovery_timer import RecoveryTimer
from closeranks.agent.job.restart_policy import (
    DesiredSize,
    GiveUp,
    NextGeneration,
    WaitForHosts,
    decide,
    request_at_boundary,
)
from closeranks.agent.launch_plan import LaunchPlan, ResizedLaunch
from closeranks.agent.membership.effects import GenerationSettled
from closeranks.core.errors import SetupError
from closeranks.core.events import Event, HostChanged, RankLost, RunStarted, StepDone, decode
from closeranks.core.requests import REGROUP, RunRequest

_MEASURED_FLOPS = "measured_flops"
"""Not measured again if the generation before measured it with as many workers on each host."""
_BUCKET_MIB = "bucket_mib"
"""Never measured again by a later generation, however many workers it has: it is part of the numerics."""


class Recovery:
    """The recovery state of one run. ``emit`` is called with the agent's own events."""

    def __init__(self, plan: LaunchPlan, emit: Callable[[Event], None]) -> None:
        self._plan = plan
        self._emit = emit
        self.limits = plan.recovery_settings.limits if plan.recovery_settings else FaultLimits(stragglers="off")
        self.placements: tuple[HostPlacement, ...] = ()
        self.quarantined: frozenset[str] = frozenset()
        self.leaving: RootCause | None = None
        """Why this generation was asked to end at a step boundary."""
        self.noticed_at: float | None = None
        """When the end of this generation was detected."""
        self._num_wanted = 0
        self._num_done = 0
        self._log = FaultLog()
        self._timer: RecoveryTimer | None = None
        self._measured: tuple[tuple[int, ...], float | None] = ((), None)
        self._bucket_mib = 0.0

    @property
    def is_recovering(self) -> bool:
        """Whether a fault was detected and the recovery from it is not complete."""
        return self._timer is not None or self.noticed_at is not None

    @property
    def can_recover(self) -> bool:
        return self._plan.recovery_settings is not None

    @property
    def step(self) -> int:
        """The step being computed, as far as rank 0 has reported."""
        return self._num_done + 1

    def host_of(self, rank: int) -> str:
        return hosts_by_rank(self.placements).get(rank, "")

    # --- while a generation runs

    def on_event(self, rank: int, fields: dict[str, Any], generation: int, now: float) -> None:
        """Track progress by rank 0's events; the first finished step after a fault completes its recovery."""
        event = decode(fields) if rank == 0 else None
        match event:
            case None:
                return
            case StepDone(step=step):
                self._num_done = max(self._num_done, step)
            case RunStarted(measured_flops=flops, bucket_mib=bucket_mib):
                self._measured = (self._counts, flops)
                self._bucket_mib = bucket_mib or self._bucket_mib
        closed = self._timer.on_event(event, generation, now) if self._timer else None
        if closed is not None:
            self._timer = None
            self._emit(closed)

    def on_formed(self, now: float) -> None:
        """Every host has started its workers."""
        if self._timer is not None:
            self._timer.mark("fork", now)

    def at_boundary(self, host: str, change: str, host_table: HostTable, now: float) -> RootCause | RunRequest | None:
        """A host has joined or wants to leave: the reason to regroup for it, or another request to the workers."""
        if not self.can_recover or self.leaving is not None or not self.placements:
            return None
        what = request_at_boundary(
            self.placements, self._log.faults, host_table.hosts, self.limits, now, self._desired_size
        )
        if what != REGROUP:
            return what
        is_new = change == "joined"
        cause = f"{host} has {'joined' if is_new else 'to leave'}"
        return external_cause("resize" if is_new else "preempted", cause, step=self.step)

    # --- from one generation to the next

    def first_placement(self, host_table: HostTable) -> tuple[tuple[HostPlacement, ...], ResizedLaunch]:
        """The first placement; raises if the run cannot begin on the hosts that have joined."""
        plan, settings = self._plan, self._plan.recovery_settings
        self._num_wanted = plan.num_workers * plan.max_hosts
        capacity = min(host_table.capacity, self._num_wanted)
        fitted: ResizedLaunch | None = ResizedLaunch(capacity, plan.payload)
        if settings is not None and capacity < self._num_wanted:
            fitted = settings.fit(capacity, self._num_wanted)
        if fitted is None or fitted.num_workers < capacity:
            what = f"the job cannot begin with {capacity} of {self._num_wanted} workers"
            raise SetupError(what, "Wait for more hosts (--hosts), or choose a layout for that many workers.")
        return place_workers(host_table.hosts, capacity), fitted

    def begin_generation(self, placements: tuple[HostPlacement, ...], fitted: ResizedLaunch) -> Mapping[str, Any]:
        """The payload for the workers of the next generation."""
        self.placements = placements
        self.noticed_at = self.leaving = None
        counts, flops = self._measured
        found = {_MEASURED_FLOPS: flops if counts == self._counts else None, _BUCKET_MIB: self._bucket_mib}
        return {**fitted.payload, **{key: value for key, value in found.items() if value}}

    def on_generation_end(self, settled: GenerationSettled, report: HostReport, now: float) -> RootCause | None:
        """A generation is over: why another is needed; None: none is. Raises a ``UserError`` of the job."""
        lost_host = find_lost_host(settled, [placement.host for placement in self.placements])
        root_cause = root_cause_of(settled, report, lost_host, next_step=self.step, leaving=self.leaving)
        if root_cause is None:
            return None
        if root_cause.is_user_error:
            raise root_cause.error
        self._report_lost(root_cause, report, lost_host or self.host_of(root_cause.culprit), settled.generation, now)
        return root_cause

    def _report_lost(self, root_cause: RootCause, report: HostReport, host: str, generation: int, now: float) -> None:
        noticed_at = self.noticed_at or now
        num_done = max(self._num_done, steps_done(worker.step for worker in report.workers))
        self._log = self._log.add(root_cause, at=noticed_at, generation=generation, host=host, num_done=num_done)
        hang_s = max((worker.hang_s for worker in report.workers), default=0.0)
        lost = RankLost(
            generation, root_cause.culprit, host, root_cause.step, root_cause.kind, root_cause.cause, hang_s
        )
        first_at = self._timer.noticed_at if self._timer is not None else noticed_at
        self._timer = RecoveryTimer(lost, first_at, self._num_done)
        self._timer.mark("fence", now)
        self._emit(lost)

    def next_decision(
        self, root_cause: RootCause, hosts: Sequence[HostState], now: float, *, is_stopping: bool
    ) -> NextGeneration | WaitForHosts:
        """The restart policy's decision; raises if it gives up. A run that is stopping does not wait for hosts."""
        limits = replace(self.limits, wait_s=0.0) if is_stopping else self.limits
        decision = decide(self._log.faults, hosts, limits, now, self._desired_size)
        if isinstance(decision, GiveUp):
            raise decision.error(root_cause.error)
        if isinstance(decision, NextGeneration):
            self._report_quarantined(decision, now)
        return decision

    def _report_quarantined(self, decision: NextGeneration, now: float) -> None:
        for host in decision.quarantined - self.quarantined:
            why = why_quarantined(host, self._log.faults, self.limits, now)
            self._emit(HostChanged(host, "quarantined", why))
        self.quarantined = decision.quarantined

    @property
    def _desired_size(self) -> DesiredSize:
        settings = self._plan.recovery_settings
        if settings is None:
            return DesiredSize(self._num_wanted)
        wanted = self._num_wanted
        return DesiredSize(wanted, lambda count: settings.fit(count, wanted), settings.samples_of)

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(placement.num_workers for placement in self.placements)

"""The restart policy: after a generation has ended, does the run continue, where, and with how many workers?

Values in, decision out; nothing here touches a process. Invariants: within ``fault_window_s`` a run continues after at
most ``max_faults`` faults; a fault of the code or the data ends it after ``max_repeats`` attempts, and is reported with
step and samples; a user error is never retried. The reason that ends a run is given in a sentence, with what to do
about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.fault_log import FaultRecord, faults_within, num_repeats, summarize_faults
from closeranks.agent.job.placement import HostPlacement, HostState, place_workers, quarantined_hosts, total_capacity
from closeranks.agent.launch_plan import ResizedLaunch
from closeranks.core.errors import CloseranksError, RunFailed
from closeranks.core.requests import DRAIN, REGROUP, RunRequest

__all__ = [
    "DesiredSize",
    "FaultRecord",
    "GiveUp",
    "HostPlacement",
    "HostState",
    "NextGeneration",
    "WaitForHosts",
    "decide",
    "request_at_boundary",
]

_MEMORY_WORDS = ("OutOfMemory", "out of memory", "MemoryError", "bad_alloc")


@dataclass(frozen=True, slots=True)
class DesiredSize:
    """The desired size of the run, and how to make it smaller."""

    num_workers: int
    """As requested; never more."""
    fit: Callable[[int], ResizedLaunch | None] | None = None
    """The job on at most so many workers, or None if that is impossible; without it the run cannot be made smaller."""
    samples_of: Callable[[int], str] | None = None
    """Which samples a step takes, in words for people."""

    def fit_to(self, num_available: int) -> ResizedLaunch | None:
        """The largest version of the job that so many workers can run."""
        num_available = min(num_available, self.num_workers)
        if self.fit is not None:
            return self.fit(num_available) if num_available else None
        return ResizedLaunch(self.num_workers, {}) if num_available == self.num_workers else None


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """The next generation."""

    placements: tuple[HostPlacement, ...]
    """In rank order: the first of these hosts has rank 0."""
    fitted: ResizedLaunch
    quarantined: frozenset[str] = frozenset()
    """Hosts with too many recent faults; some may still be in ``placements``, if the other hosts lack capacity."""

    @property
    def num_workers(self) -> int:
        return sum(one.num_workers for one in self.placements)


@dataclass(frozen=True, slots=True)
class WaitForHosts:
    """Decide again at ``until``, or when a host joins."""

    until: float
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends here."""

    reason: Literal["mistake", "repeats", "budget", "room"]
    what: str
    fix: str = ""

    def error(self, last: CloseranksError) -> CloseranksError:
        """What to raise, given the error of the last fault."""
        if self.reason == "mistake":
            return last
        return RunFailed(f"{self.sentence}\n{last}", rank=last.rank, step=last.step)

    @property
    def sentence(self) -> str:
        return f"{self.what}. {self.fix}".rstrip()


def decide(
    faults: Sequence[FaultRecord], hosts: Sequence[HostState], limits: FaultLimits, now: float, desired: DesiredSize
) -> NextGeneration | WaitForHosts | GiveUp:
    """``faults``: all of the run so far. Calling it again with the same ones, after a wait or a regroup, is safe."""
    return (
        _mistake(faults)
        or _repeats(faults, limits, desired)
        or _budget(faults, limits, now)
        or _next_generation(faults, hosts, limits, now, desired)
    )


def request_at_boundary(
    current: Sequence[HostPlacement],
    faults: Sequence[FaultRecord],
    hosts: Sequence[HostState],
    limits: FaultLimits,
    now: float,
    desired: DesiredSize,
) -> RunRequest | None:
    """The request to a healthy generation with this placement: to grow, release a host, or move off a bad one.

    ``DRAIN``: a host leaves and the others cannot continue without it, so the state must be saved.
    """
    leaving = {host.name for host in hosts if host.state == "leaving"}
    must_leave = any(one.host in leaving for one in current)
    decision = _next_generation(faults, hosts, limits, now, desired)
    match decision:
        case GiveUp():
            return DRAIN if must_leave else None
        case WaitForHosts():
            return REGROUP if must_leave else None
    num_current = sum(one.num_workers for one in current)
    is_safer = _num_on(decision.quarantined, decision.placements) < _num_on(decision.quarantined, current)
    is_better = decision.num_workers > num_current or (decision.num_workers == num_current and is_safer)
    return REGROUP if must_leave or is_better else None


def _num_on(hosts: frozenset[str], placements: Sequence[HostPlacement]) -> int:
    return sum(one.num_workers for one in placements if one.host in hosts)


def _mistake(faults: Sequence[FaultRecord]) -> GiveUp | None:
    return GiveUp("mistake", faults[-1].cause) if faults and faults[-1].is_user_error else None


def _repeats(faults: Sequence[FaultRecord], limits: FaultLimits, desired: DesiredSize) -> GiveUp | None:
    """A kill from outside can hit a step twice by chance, so it needs one more repeat than an exception of the code."""
    count = num_repeats(faults)
    if not count or count < limits.max_repeats + faults[-1].is_silent:
        return None
    last = faults[-1]
    cause = last.cause.rstrip(".")
    where = _location(last.step, desired)
    if count == 1:
        what = f"{where} failed: {cause}; elastic.max_repeats = 1 allows no second try"
        return GiveUp("repeats", what, _advice(last))
    why = "This is deterministic: the code or the data causes it, and another try would fail there too"
    return GiveUp("repeats", f"{where} failed {count} times in the same way: {cause}. {why}", _advice(last))


def _location(step: int | None, desired: DesiredSize) -> str:
    if step is None:
        return "the start of a generation, before its first step,"
    samples = desired.samples_of(step) if desired.samples_of else ""
    return f"step {step} ({samples})" if samples else f"step {step}"


def _advice(fault: FaultRecord) -> str:
    resume = "then resume with checkpoint.resume."
    if fault.kind == "oom" or any(word in fault.signature for word in _MEMORY_WORDS):
        return f"Use a smaller train.micro_batch, train.recompute or a higher layout.zero, {resume}"
    if fault.kind == "hang":
        return f"Its log shows the stack of each thread; fix what it waits for, {resume}"
    if fault.is_silent:
        return f"Find out who kills it (dmesg, the scheduler, the code of this step), {resume}"
    if fault.step is None:  # no sample was read yet
        return f"Fix the code, {resume}"
    return f"Fix the code, or inspect those samples and remove the bad ones, {resume}"


def _budget(faults: Sequence[FaultRecord], limits: FaultLimits, now: float) -> GiveUp | None:
    recent = faults_within(faults, limits.fault_window_s, now)
    if not recent or len(recent) <= limits.max_faults:
        return None
    counted = f"{len(recent)} faults" if len(recent) > 1 else "a fault"
    what = f"{counted} within {_duration(limits.fault_window_s)} ({summarize_faults(recent)})"
    what += f", more than elastic.max_faults = {limits.max_faults}; the last: {recent[-1].cause.rstrip('.')}"
    return GiveUp("budget", what, "Fix their common cause, or raise elastic.max_faults.")


def _next_generation(
    faults: Sequence[FaultRecord], hosts: Sequence[HostState], limits: FaultLimits, now: float, desired: DesiredSize
) -> NextGeneration | WaitForHosts | GiveUp:
    num_available = total_capacity(hosts)
    fitted = desired.fit_to(num_available)
    num_workers = fitted.num_workers if fitted else 0
    if num_workers < desired.num_workers and (waiting := _wait(hosts, limits, now, num_available)):
        return waiting
    if fitted is None or num_workers < limits.min_workers:
        return _no_room(num_available, limits, desired)
    if num_workers < desired.num_workers and not fitted.summary:
        summary = f"{num_workers} of {_workers(desired.num_workers)}; same batch, order and learning rate"
        fitted = replace(fitted, summary=summary)
    avoided = quarantined_hosts(hosts, faults, limits, now)
    return NextGeneration(place_workers(hosts, num_workers, avoided), fitted, avoided)


def _wait(hosts: Sequence[HostState], limits: FaultLimits, now: float, num_available: int) -> WaitForHosts | None:
    missing = [host for host in hosts if host.state != "ready"]
    until = max((host.since + limits.wait_s for host in missing), default=now)
    if until <= now:
        return None
    names = ", ".join(host.name for host in missing)
    them = "it" if len(missing) == 1 else "them"
    can = f"{_workers(num_available)} can be started without {names}"
    why = f"{can}; waiting {until - now:.3g} s for {them} or another host"
    return WaitForHosts(until, why)


def _no_room(num_available: int, limits: FaultLimits, desired: DesiredSize) -> GiveUp:
    """Too few workers are left: fewer than the job's minimum, or than any legal layout needs."""
    left = f"{_workers(num_available)} of {desired.num_workers} can still be started"
    if desired.fit is None:
        why = "this run cannot be made smaller"
    elif num_available < limits.min_workers:
        why = f"elastic.min_workers = {limits.min_workers}"
    else:
        why = "no layout with so few workers is valid for this model and batch"
    fix = "Add a host with `closeranks agent --join`, lower elastic.min_workers or resume later with checkpoint.resume."
    return GiveUp("room", f"{left}, and {why}", fix)


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.3g} s"

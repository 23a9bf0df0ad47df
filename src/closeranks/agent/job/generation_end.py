"""Determines why a generation ended and, if it was the last, how the run ended.

Host reports in; root cause, outcome or error out. Invariants: a host that was lost before it could report is named
before any worker that failed because of its loss; a user who pressed Ctrl-C is told that the run stopped, not how a
worker died of it; in every other case the failure is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from closeranks.agent.detection.host_report import HostReport, has_failed
from closeranks.agent.detection.root_cause import RootCause, external_cause, find_root_cause
from closeranks.agent.job.shutdown import ShutdownRequest, counts_as_failure
from closeranks.agent.launch_plan import JobOutcome
from closeranks.agent.membership.effects import GenerationSettled
from closeranks.core.errors import RunFailed
from closeranks.core.requests import DRAIN, REGROUP


def find_lost_host(settled: GenerationSettled, members: Sequence[str]) -> str:
    """A member that was lost before it could report how its workers ended; failures that other hosts reported earlier
    are consequences of its loss."""
    silent = [name for name in members if name not in settled.facts]
    return settled.cause.host if settled.cause.host in silent else next(iter(silent), "")


def root_cause_of(
    settled: GenerationSettled, report: HostReport, lost_host: str, *, next_step: int, leaving: RootCause | None
) -> RootCause | None:
    """Why another generation is needed; None: none is. ``leaving``: why this one was asked to end, if it was."""
    if lost_host:
        cause = settled.cause.what if settled.cause.host == lost_host else "no heartbeat arrived in time"
        return external_cause("host", f"{lost_host} was lost: {cause}", step=next_step)
    if report.zygote:
        first = report.zygote.partition("\n")[0]
        return external_cause("zygote", first, step=next_step, error=RunFailed(report.zygote))
    if has_failed(report):
        return find_root_cause(report.workers, report.num_oom_kills)
    if has_regrouped(report):
        return leaving or external_cause("resize", "the workers regroup")
    return None


def conclude(
    settled: GenerationSettled, report: HostReport, stop: ShutdownRequest | None, on_note: Callable[[str], None]
) -> JobOutcome:
    """The outcome of the run; raises the error of a run that failed."""
    if report.zygote:
        raise RunFailed(report.zygote)
    statuses = {worker.rank: worker.status for worker in report.workers if worker.status is not None}
    failed_at = first_failure(report)
    if counts_as_failure(failed_at, stop):
        raise find_root_cause(report.workers, report.num_oom_kills).error
    if failed_at is not None:
        on_note(f"While stopping, {find_root_cause(report.workers, report.num_oom_kills).error}")
    if stop is not None:
        return JobOutcome(stop.reason, statuses)
    if failed_at is None and settled.cause.why != "done":
        who = f"{settled.cause.host}: " if settled.cause.host else ""
        raise RunFailed(f"the workers were killed before they finished: {who}{settled.cause.what or settled.cause.why}")
    is_drained = any(DRAIN.kind in worker.ended_for for worker in report.workers)
    return JobOutcome("drained" if is_drained else "finished", statuses)


def has_regrouped(report: HostReport) -> bool:
    """Whether all workers agreed to end, for another generation to take over."""
    workers = report.workers
    return bool(workers) and all(REGROUP.kind in worker.ended_for and worker.status == 0 for worker in workers)


def first_failure(report: HostReport) -> float | None:
    """When the first worker failed; None where none did."""
    times = [
        worker.failure.at if worker.failure is not None else worker.died_at
        for worker in report.workers
        if worker.failure is not None or (worker.died_at is not None and (worker.status != 0 or not worker.is_finished))
    ]
    return min((at for at in times if at is not None), default=None)


def killed_early(report: HostReport) -> list[int]:
    """Ranks that did not end by themselves but were killed when the deadline passed."""
    return [worker.rank for worker in report.workers if worker.died_at is None and not worker.is_finished]

"""Finds the root cause of a failed generation: which worker failed first, and the error that reports it.

Worker reports in, root cause out; nothing here touches a process. Invariant: one report, the culprit first.
[Note: root cause] A silent death precedes any exception, since ranks that lose another rank raise at once, while a dead
rank cannot report; exceptions follow by the monotonic time at which they were caught; those that look like the loss of
another rank come last. An abort by native code is ordered among the exceptions, because it can itself be a consequence
of such a loss (NCCL's watchdog, an exception in a thread of gloo). A worker that the agent declared hung comes between
silent deaths and exceptions.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from closeranks.agent.detection.exit_status import describe_status
from closeranks.agent.detection.failure import FailureReport
from closeranks.core.errors import CloseranksError, RunFailed, UserError, decode

# A dying process closes its sockets milliseconds before its death can be seen: exceptions of other ranks in that time
# are consequences.
_ABORT_LEAD_S = 0.1
_MAX_TAIL_CHARS = 200
_MAX_SIGNATURE_CHARS = 300
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)

CauseKind = Literal["killed", "oom", "exception", "hang", "stopped", "slow", "preempted", "host", "zygote", "resize"]
"""How a generation ended: a worker was ``killed`` by a signal, ran out of memory (``oom``), raised an ``exception`` or
exited, hung (``hang``), or was ``stopped`` by SIGSTOP; its ``host`` or its ``zygote`` was lost; or, which is no fault,
a worker was ``slow`` or ``preempted`` or the number of workers changes (``resize``)."""

# These signals are sent from outside; a step that is retried need not meet them again.
_EXTERNAL_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What is known about one worker when a generation has ended."""

    rank: int
    step: int | None = None
    phase: str = ""
    status: int | None = None
    """Exit status; None while it is alive, or if it could not be learned."""
    died_at: float | None = None
    """``time.monotonic()`` when its death was seen; None: it lived until the agent killed it."""
    is_finished: bool = False
    """Whether its entry returned and reported so; a script is also finished when it exited with 0."""
    failure: FailureReport | None = None
    hang_kind: str = ""
    """``hang`` or ``stopped`` if the agent declared it hung while it was alive; else empty."""
    hang_s: float = 0.0
    """For how long it had hung by then."""
    hang_cause: str = ""
    """The hang in words, with the phase; empty: nothing more is known."""
    ended_for: tuple[str, ...] = ()
    """The kinds of requests that it ended for, if it was asked to end."""
    log: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RootCause:
    """The culprit, the cause, and the error to raise if the run ends with it."""

    culprit: int
    """-1: no rank in particular."""
    error: CloseranksError
    kind: CauseKind = "exception"
    cause: str = ""
    """One line for people."""
    signature: str = ""
    """The same for the same fault, on whatever rank; numbers that differ between attempts are left out."""
    step: int | None = None
    """The step that the culprit was in; None before its first."""
    is_silent: bool = False
    """Whether the cause is unknown: probably a kill from outside, or lost contact."""

    @property
    def is_user_error(self) -> bool:
        """Whether the user must fix it, so that retrying is useless."""
        return isinstance(self.error, UserError)


class _Order(IntEnum):
    SILENT = 0
    HUNG = 1
    REPORTED = 2
    EXITED = 3
    CONSEQUENCE = 4
    BYSTANDER = 5


def find_root_cause(workers: Sequence[WorkerReport], num_oom_kills: int = 0) -> RootCause:
    """The culprit and the one error that reports it. At least one worker must have failed."""
    ordered = sorted(workers, key=_precedence)
    culprit = ordered[0]
    order = _order(culprit)
    if order is _Order.BYSTANDER:
        raise ValueError("no worker has failed: there is nothing to judge")
    reported = decode(culprit.failure.error) if culprit.failure and culprit.failure.error else None
    if isinstance(reported, UserError):
        error: CloseranksError = _with_rank(reported, culprit, workers)
    else:
        report = _report(culprit, ordered[1:], len(workers), num_oom_kills)
        error = RunFailed(report, rank=culprit.rank, step=_step(culprit))
    kind = _kind(culprit, num_oom_kills)
    is_nobody = len(workers) > 1 and all(_order(worker) is _Order.HUNG for worker in workers)
    return RootCause(
        culprit=-1 if is_nobody else culprit.rank,
        error=error,
        kind=kind,
        cause=_cause(culprit, num_oom_kills).partition("\n")[0],
        signature=_signature(culprit, kind),
        step=_step(culprit),
        is_silent=order is _Order.CONSEQUENCE
        or (kind == "killed" and (culprit.status is None or culprit.status in _EXTERNAL_SIGNALS)),
    )


def external_cause(
    kind: CauseKind, cause: str, *, rank: int = -1, step: int | None = None, error: CloseranksError | None = None
) -> RootCause:
    """A cause that no worker reports: a lost host or zygote, or an agreed end. ``cause``: one sentence."""
    error = error or RunFailed(cause, rank=None if rank < 0 else rank, step=step)
    return RootCause(rank, error, kind, cause.partition("\n")[0], kind, step, is_silent=True)


def _kind(worker: WorkerReport, num_oom_kills: int) -> CauseKind:
    if _order(worker) is _Order.HUNG:
        return "stopped" if worker.hang_kind == "stopped" else "hang"
    if worker.failure is not None or (worker.status is not None and worker.status >= 0):
        return "exception"
    return "oom" if worker.status == -signal.SIGKILL and num_oom_kills else "killed"


def _signature(worker: WorkerReport, kind: CauseKind) -> str:
    """What must be equal for two faults in one step to count as the same."""
    if kind == "hang":
        return f"hang while {worker.phase}"
    if kind in ("oom", "stopped"):
        return kind
    if worker.failure is None:
        return describe_status(worker.status)
    # Addresses, process ids and free bytes differ each time; the line of code does not.
    message = _NUMBERS.sub("#", worker.failure.message)[:_MAX_SIGNATURE_CHARS]
    return f"{worker.failure.kind} at {worker.failure.place}: {message}"


def _order(worker: WorkerReport) -> _Order:
    if worker.failure is not None and not worker.failure.is_consequence:
        return _Order.REPORTED
    if worker.hang_kind and worker.died_at is None:
        return _Order.HUNG
    if worker.failure is not None:
        return _Order.CONSEQUENCE
    if worker.died_at is None or (worker.is_finished and worker.status == 0):
        return _Order.BYSTANDER
    if worker.status == 0:
        return _Order.EXITED
    return _Order.REPORTED if worker.status == -signal.SIGABRT else _Order.SILENT


def _precedence(worker: WorkerReport) -> tuple[_Order, float, int]:
    if worker.failure is not None:
        return _order(worker), worker.failure.at, worker.rank
    at = worker.died_at if worker.died_at is not None else float("inf")
    return _order(worker), at - _ABORT_LEAD_S if worker.status == -signal.SIGABRT else at, worker.rank


def _with_rank(error: UserError, culprit: WorkerReport, workers: Sequence[WorkerReport]) -> UserError:
    """Add the rank to a user error, unless every rank raised the same one: a single rank may have met a bad file."""
    is_everywhere = all(worker.failure is not None and worker.failure.error == _error(culprit) for worker in workers)
    if not is_everywhere and error.rank is None and len(workers) > 1:
        error.rank = culprit.rank
    return error


def _error(worker: WorkerReport) -> dict[str, object] | None:
    return worker.failure.error if worker.failure else None


def _step(worker: WorkerReport) -> int | None:
    if worker.failure is not None and worker.failure.step is not None:
        return worker.failure.step
    return worker.step


def _report(culprit: WorkerReport, others: Sequence[WorkerReport], num_ranks: int, num_oom_kills: int) -> str:
    step = _step(culprit)
    where = "before its first step" if step is None else f"at step {step}"
    is_explained = culprit.failure is not None or culprit.hang_cause
    doing = f" ({culprit.phase})" if culprit.phase and not is_explained else ""
    all_hung = bool(others) and all(_order(worker) is _Order.HUNG for worker in (culprit, *others))
    who = f"all {num_ranks} ranks" if all_hung else f"rank {culprit.rank} of {num_ranks}"
    lines = [f"{who} failed {where}{doing}: {_cause(culprit, num_oom_kills)}"]
    if others and not all_hung:
        lines.append(_what_others_did(culprit, others))
    lines += _where_to_look(culprit)
    return "\n".join(lines)


def _cause(worker: WorkerReport, num_oom_kills: int) -> str:
    failure = worker.failure
    if _order(worker) is _Order.HUNG:
        return _describe_hang(worker)
    if failure is None and worker.status == 0:
        return "exited with code 0 before its work was done: something called os._exit(0)"
    if failure is None:
        return describe_status(worker.status, num_oom_kills)
    place = f" ({failure.place})" if failure.place else ""
    if failure.kind == "SystemExit":
        return f"sys.exit({failure.message}) was called{place}"
    if failure.error is not None:
        return f"{decode(failure.error)}{place}"
    return f"{failure.kind}: {failure.message}{place}" if failure.message else f"{failure.kind}{place}"


def _describe_hang(worker: WorkerReport) -> str:
    if worker.hang_cause:
        return f"{worker.hang_cause}; declared hung"
    lasted = f" for {worker.hang_s:.3g} s" if worker.hang_s else ""
    if worker.hang_kind == "stopped":
        return f"stopped by SIGSTOP{lasted}; declared hung"
    return f"made no progress{lasted}; declared hung"


def _what_others_did(culprit: WorkerReport, others: Sequence[WorkerReport]) -> str:
    """One line. Ranks with an error that is not a consequence are listed with it: there may be two causes."""
    agreeing = [worker.rank for worker in others if _same(worker, culprit)]
    if len(agreeing) == len(others):
        return f"{describe_ranks(agreeing)} failed in the same way"
    own = [worker for worker in others if _order(worker) <= _Order.REPORTED and not _same(worker, culprit)]
    done = [worker.rank for worker in others if worker.is_finished and worker.status == 0]
    named = {*agreeing, *done, *(worker.rank for worker in own)}
    rest = [worker.rank for worker in others if worker.rank not in named]
    parts = [f"{describe_ranks(agreeing)} failed in the same way"] if agreeing else []
    parts += [f"{describe_ranks(rest)} stopped because of it"] if rest else []
    parts += [f"{describe_ranks(done)} had finished before"] if done else []
    parts += [f"rank {worker.rank} failed too: {_cause(worker, 0)}".splitlines()[0] for worker in own[:2]]
    parts += [f"so did {len(own) - 2} more"] if len(own) > 2 else []
    return "; ".join(parts)


def _same(worker: WorkerReport, culprit: WorkerReport) -> bool:
    if worker.failure is None or culprit.failure is None:
        return False
    return (worker.failure.kind, worker.failure.message) == (culprit.failure.kind, culprit.failure.message)


def _where_to_look(culprit: WorkerReport) -> list[str]:
    """Point to the log for a traceback; after a silent death, show the end of the log at once."""
    if culprit.failure is not None:
        return [f"the whole traceback is in {culprit.log}"] if culprit.log else []
    if not culprit.log_tail:
        return [f"its log, {culprit.log}, is empty"] if culprit.log else []
    return [f"its log, {culprit.log}, ends with:", *(f"  | {line[:_MAX_TAIL_CHARS]}" for line in culprit.log_tail)]


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 3``, ``ranks 0-6 and 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [
        name for run in runs for name in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
    ]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    listed = " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    return f"ranks {listed}"

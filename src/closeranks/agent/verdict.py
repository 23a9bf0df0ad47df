"""Which worker brought the run down, and what is the person told?

Facts in, verdict out; nothing here touches a process. Invariant: one report, the culprit first. [Note: root cause] A
silent death goes before any exception, since whoever lost a peer complains at once while the dead cannot speak;
exceptions follow by the monotonic time at which they were caught; what reads like the loss of a peer comes last. An
abort by native code takes its place among the exceptions, because it can be such a complaint itself (NCCL's watchdog,
an exception in a thread of gloo's).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from closeranks.agent.exits import in_words
from closeranks.agent.failure import FailureReport
from closeranks.core.errors import CloseranksError, RunFailed, UserError, decode

# A dying process closes its sockets milliseconds before its death can be seen: its peers' complaints are not first.
_ABORT_LEAD_S = 0.1
_MAX_TAIL_CHARS = 200


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """What is known of one worker when the run has failed."""

    rank: int
    step: int | None = None
    phase: str = ""
    status: int | None = None
    """Exit status; None while alive, or where nobody could tell."""
    died_at: float | None = None
    """``time.monotonic()`` when its death was seen; None: it lived until the agent killed it."""
    is_finished: bool = False
    """Whether its entry returned and said so."""
    failure: FailureReport | None = None
    log: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who, and the error to raise."""

    culprit: int
    error: CloseranksError


class _Order(IntEnum):
    SILENT = 0
    SPOKEN = 1
    LEFT = 2
    ECHO = 3
    BYSTANDER = 4


def judge(facts: Sequence[WorkerFact], num_oom_kills: int = 0) -> Verdict:
    """The culprit and the one error that tells of it. At least one worker must have failed."""
    ordered = sorted(facts, key=_precedence)
    culprit = ordered[0]
    order = _order(culprit)
    if order is _Order.BYSTANDER:
        raise ValueError("no worker has failed: there is nothing to judge")
    spoken = decode(culprit.failure.error) if culprit.failure and culprit.failure.error else None
    if isinstance(spoken, UserError):
        return Verdict(culprit.rank, _placed(spoken, culprit, facts))
    report = _report(culprit, ordered[1:], len(facts), num_oom_kills)
    return Verdict(culprit.rank, RunFailed(report, rank=culprit.rank, step=_step(culprit)))


def _order(fact: WorkerFact) -> _Order:
    if fact.failure is not None:
        return _Order.ECHO if fact.failure.is_consequence else _Order.SPOKEN
    if fact.died_at is None or (fact.is_finished and fact.status == 0):
        return _Order.BYSTANDER
    if fact.status == 0:
        return _Order.LEFT
    return _Order.SPOKEN if fact.status == -signal.SIGABRT else _Order.SILENT


def _precedence(fact: WorkerFact) -> tuple[_Order, float, int]:
    if fact.failure is not None:
        return _order(fact), fact.failure.at, fact.rank
    at = fact.died_at if fact.died_at is not None else float("inf")
    return _order(fact), at - _ABORT_LEAD_S if fact.status == -signal.SIGABRT else at, fact.rank


def _placed(error: UserError, culprit: WorkerFact, facts: Sequence[WorkerFact]) -> UserError:
    """A mistake that every rank met needs no rank; one that a single rank met (a bad file, say) does."""
    is_everywhere = all(fact.failure is not None and fact.failure.error == _error(culprit) for fact in facts)
    if not is_everywhere and error.rank is None and len(facts) > 1:
        error.rank = culprit.rank
    return error


def _error(fact: WorkerFact) -> dict[str, object] | None:
    return fact.failure.error if fact.failure else None


def _step(fact: WorkerFact) -> int | None:
    if fact.failure is not None and fact.failure.step is not None:
        return fact.failure.step
    return fact.step


def _report(culprit: WorkerFact, others: Sequence[WorkerFact], num_ranks: int, num_oom_kills: int) -> str:
    step = _step(culprit)
    where = "before its first step" if step is None else f"at step {step}"
    doing = f" ({culprit.phase})" if culprit.phase and culprit.failure is None else ""
    lines = [f"rank {culprit.rank} of {num_ranks} failed {where}{doing}: {_cause(culprit, num_oom_kills)}"]
    if others:
        lines.append(_what_others_did(culprit, others))
    lines += _where_to_look(culprit)
    return "\n".join(lines)


def _cause(fact: WorkerFact, num_oom_kills: int) -> str:
    failure = fact.failure
    if failure is None and fact.status == 0:
        return "exited with code 0 while the other ranks still needed it"
    if failure is None:
        return in_words(fact.status, num_oom_kills)
    place = f" ({failure.place})" if failure.place else ""
    if failure.kind == "SystemExit":
        return f"sys.exit({failure.message}) was called{place}"
    if failure.error is not None:
        return f"{decode(failure.error)}{place}"
    return f"{failure.kind}: {failure.message}{place}" if failure.message else f"{failure.kind}{place}"


def _what_others_did(culprit: WorkerFact, others: Sequence[WorkerFact]) -> str:
    """One line. Ranks with an error of their own, not an echo, are named with it: there may be two causes."""
    agreeing = [fact.rank for fact in others if _same(fact, culprit)]
    if len(agreeing) == len(others):
        return f"{_ranks(agreeing)} failed in the same way"
    own = [fact for fact in others if _order(fact) <= _Order.SPOKEN and not _same(fact, culprit)]
    done = [fact.rank for fact in others if fact.is_finished and fact.status == 0]
    named = {*agreeing, *done, *(fact.rank for fact in own)}
    rest = [fact.rank for fact in others if fact.rank not in named]
    parts = [f"{_ranks(agreeing)} failed in the same way"] if agreeing else []
    parts += [f"{_ranks(rest)} stopped because of it"] if rest else []
    parts += [f"{_ranks(done)} had finished before"] if done else []
    parts += [f"rank {fact.rank} failed too: {_cause(fact, 0)}".splitlines()[0] for fact in own[:2]]
    parts += [f"so did {len(own) - 2} more"] if len(own) > 2 else []
    return "; ".join(parts)


def _same(fact: WorkerFact, culprit: WorkerFact) -> bool:
    if fact.failure is None or culprit.failure is None:
        return False
    return (fact.failure.kind, fact.failure.message) == (culprit.failure.kind, culprit.failure.message)


def _where_to_look(culprit: WorkerFact) -> list[str]:
    """A traceback stands in the log; the last words of a silent death are worth showing at once."""
    if culprit.failure is not None:
        return [f"the whole traceback is in {culprit.log}"] if culprit.log else []
    if not culprit.log_tail:
        return [f"its log, {culprit.log}, is empty"] if culprit.log else []
    return [f"its log, {culprit.log}, ends with:", *(f"  | {line[:_MAX_TAIL_CHARS]}" for line in culprit.log_tail)]


def _ranks(ranks: Sequence[int]) -> str:
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

"""Says why ranks stand still, in words: who waits for whom, where, since when, and probably why. Pure.

A rank that waits in a collective waits for the members of its group that have not issued it; following that from rank
to rank ends at the ranks that wait for nobody, which hold up all others. Where the ranks' collectives do not match,
that is the cause, whatever the ranks do by now.

Invariants: the evidence of some ranks may be missing, and the text says so; at most one rank is blamed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from closeranks.agent.detection.progress import PHASE_WORDS, WorkerPhase
from closeranks.agent.detection.root_cause import describe_ranks
from closeranks.agent.detection.standstill.collective_mismatch import Mismatch, find_mismatch
from closeranks.agent.detection.standstill.collective_record import Collective, GroupLabel
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence

_log = logging.getLogger(__name__)
MISMATCHES = frozenset({"branch", "shape", "dtype", "order"})
"""Kinds of cause that waiting does not cure."""
_BUSY = 0.5
"""Processors that a rank keeps busy: it computes."""
_MAX_LINES = 8

Evidence = Mapping[int, RankEvidence]


@dataclass(frozen=True, slots=True)
class Explanation:
    kind: str
    """As in ``Standstill.kind``."""
    culprit: int
    """-1: no rank in particular."""
    cause: str
    """What the culprit does, or what is wrong: one sentence without its subject's rank where there is a culprit."""
    lines: tuple[str, ...]
    """Who waits for whom, a line for each group of ranks that do the same."""

    @property
    def in_brief(self) -> str:
        """The cause without the calls that it compares."""
        return self.cause.partition(": it ")[0]

    @property
    def headline(self) -> str:
        return f"rank {self.culprit} {self.cause}" if self.culprit >= 0 else self.cause


def explain(evidence: Evidence, suspects: Sequence[int] = (), later_s: float = 0.0) -> Explanation | None:
    """``suspects``: the ranks that the agent takes for the cause, used where nothing here says more. ``later_s``: for
    how long the evidence has been here. None if nothing can be said."""
    return _or_nothing(lambda: _explain(evidence, suspects, later_s))


def _or_nothing(attempt: Callable[[], Explanation | None]) -> Explanation | None:
    """An explanation that goes wrong must not end the run that it is about."""
    try:
        return attempt()
    except Exception:
        _log.exception("a standstill could not be explained")
        return None


def _explain(evidence: Evidence, suspects: Sequence[int], later_s: float) -> Explanation | None:
    mismatch = find_mismatch({rank: one.collectives for rank, one in evidence.items()})
    lines = _lines(evidence, mismatch, later_s)
    if mismatch is not None and not any(one.state == "T" for one in evidence.values()):
        return _of_mismatch(mismatch, evidence, lines)
    roots = _roots(evidence)
    if not roots and any(one.waiting_in for one in evidence.values()):
        return _without_root(evidence, suspects, lines)
    found = [rank for rank in roots or suspects if rank in evidence]
    if not found and not roots:
        return None
    if not found:
        cause = f"the others wait for {describe_ranks(sorted(roots))}, of which nothing is known yet"
        return Explanation("unknown", -1, cause, lines)
    worst = min(found, key=lambda rank: _rank_of_kind(evidence[rank]))
    kind, cause = _doing(evidence[worst])
    is_everyone = len(found) == len(evidence) > 1
    return Explanation(kind, -1 if is_everyone else worst, f"all ranks {cause}" if is_everyone else cause, lines)


def explain_mismatch(evidence: Evidence) -> Explanation | None:
    """The mismatch between the collectives of ranks, for ranks that have failed; None if theirs match."""
    return _or_nothing(lambda: _explain_mismatch(evidence))


def _explain_mismatch(evidence: Evidence) -> Explanation | None:
    mismatch = find_mismatch({rank: one.collectives for rank, one in evidence.items()})
    return _of_mismatch(mismatch, evidence, ()) if mismatch else None


# --- who waits for whom


def _labels(evidence: Evidence) -> dict[str, GroupLabel]:
    return {label.name: label for one in evidence.values() for label in one.groups}


def _awaited(rank: int, evidence: Evidence) -> tuple[int, ...]:
    """The ranks that a rank waits for: those that have not issued its collective, else those that are stopped."""
    waiting = evidence[rank].waiting_in
    if waiting is None:
        return ()
    if waiting.is_p2p:
        return () if waiting.peer is None else (waiting.peer,)
    label = _labels(evidence).get(waiting.group)
    others = [member for member in (label.ranks if label else ()) or evidence if member != rank]
    missing = [
        member
        for member in others
        if member not in evidence or evidence[member].num_issued(waiting.group) < waiting.sequence
    ]
    stopped = [member for member in others if member in evidence and evidence[member].state == "T"]
    return tuple(stopped or missing)


def _roots(evidence: Evidence) -> set[int]:
    """The ranks at which all waiting ends: they wait in no collective, or no evidence of theirs is here."""
    stopped = {rank for rank, one in evidence.items() if one.state == "T"}
    if stopped:
        return stopped
    awaited = {other for rank in evidence for other in _awaited(rank, evidence)}
    return {rank for rank in awaited if rank not in evidence or evidence[rank].waiting_in is None}


def _without_root(evidence: Evidence, suspects: Sequence[int], lines: tuple[str, ...]) -> Explanation:
    """All ranks wait in collectives: for each other, or for what all of them have issued."""
    edges = {rank: _awaited(rank, evidence) for rank in evidence if evidence[rank].waiting_in is not None}
    if _has_cycle(edges):
        return _of_cycle(edges, evidence, lines)
    outside = [rank for rank in sorted(evidence) if evidence[rank].waiting_in is None]
    if outside and len(outside) < len(evidence):
        kind, cause = _doing(evidence[outside[0]])
        return Explanation(kind, outside[0], cause, lines)
    cause = "all ranks have issued the same collective and none completes it: a link between them is probably lost"
    return Explanation("link", -1, cause, lines)


def _has_cycle(edges: Mapping[int, Sequence[int]]) -> bool:
    """Whether some rank waits for itself in the end; ranks that wait for nobody are taken away until none is left."""
    left = {rank: set(awaited) for rank, awaited in edges.items()}
    while free := {rank for rank, awaited in left.items() if not awaited & left.keys()}:
        left = {rank: awaited for rank, awaited in left.items() if rank not in free}
    return bool(left)


def _of_cycle(edges: Mapping[int, Sequence[int]], evidence: Evidence, lines: tuple[str, ...]) -> Explanation:
    """Ranks wait for each other: one that waits in another group than most others took another branch."""
    groups = {rank: one.waiting_in.group for rank, one in evidence.items() if one.waiting_in is not None}
    usual, count = Counter(groups.values()).most_common(1)[0]
    odd = [rank for rank, group in groups.items() if group != usual]
    cause = _cycle_words(next(rank for rank, awaited in edges.items() if awaited), edges, evidence)
    if len(odd) != 1 or 2 * count <= len(groups):
        return Explanation("order", -1, cause, lines)
    waiting = evidence[odd[0]].waiting_in
    assert waiting is not None, "it is in a group"
    words = f"took another branch: it waits alone in {describe_collective(waiting, _labels(evidence))}"
    return Explanation("branch", odd[0], words, lines)


def _cycle_words(rank: int, edges: Mapping[int, Sequence[int]], evidence: Evidence) -> str:
    seen, labels, parts = [rank], _labels(evidence), []
    while True:
        following = next((one for one in edges.get(seen[-1], ()) if one in edges), None)
        waiting = evidence[seen[-1]].waiting_in
        if following is None or waiting is None:
            break
        parts.append(f"rank {seen[-1]} waits for rank {following} in {describe_collective(waiting, labels)}")
        if following in seen:
            break
        seen.append(following)
    return f"ranks wait for each other, so they call collectives in different orders: {'; '.join(parts)}"


# --- the words


def describe_collective(one: Collective, labels: Mapping[str, GroupLabel]) -> str:
    """``all_reduce float32[128] on the data axis at train.py:33 in loss``."""
    label = labels.get(one.group)
    axis = label.axis if label else ""
    where = {"": "", "world": " of all ranks"}.get(axis, f" on the {axis} axis")
    if not axis and label and label.ranks:
        where = f" of {describe_ranks(label.ranks)}"
    peer = "" if one.peer is None else f" {'to' if one.op == 'send' else 'from'} rank {one.peer}"
    tensor = f" {one.tensor}" if one.tensor else ""
    return f"{one.op}{tensor}{peer}{where}" + (f" at {one.place}" if one.place else "")


def _of_mismatch(mismatch: Mismatch, evidence: Evidence, lines: tuple[str, ...]) -> Explanation:
    labels = _labels(evidence)
    groups = mismatch.ranks_by_collective
    (usual_ranks, usual), (odd_ranks, odd) = groups[0], groups[-1]
    does, others = describe_collective(odd, labels), describe_collective(usual, labels)
    who = describe_ranks(usual_ranks)
    verb = "calls" if len(usual_ranks) == 1 else "call"
    words = {
        "shape": f"sends another shape: it calls {does}, {who} {verb} {others}",
        "dtype": f"sends another dtype: it calls {does}, {who} {verb} {others}",
        "order": f"calls collectives in another order: it calls {does} first, {who} {verb} {others}",
        "branch": f"took another branch: it calls {does}, {who} {verb} {others}",
    }[mismatch.kind]
    if len(mismatch.odd) >= 1 and odd_ranks[0] in mismatch.odd:
        return Explanation(mismatch.kind, odd_ranks[0], words, lines)
    cause = {
        "shape": "the ranks send different shapes",
        "dtype": "the ranks send different dtypes",
        "order": "the ranks call collectives in different orders",
        "branch": "the ranks took different branches",
    }[mismatch.kind]
    verb_odd = "calls" if len(odd_ranks) == 1 else "call"
    text = f"{cause}: {who} {verb} {others}, {describe_ranks(odd_ranks)} {verb_odd} {does}"
    return Explanation(mismatch.kind, -1, text, lines)


def _lines(evidence: Evidence, mismatch: Mismatch | None, later_s: float) -> tuple[str, ...]:
    """One line for the ranks that do the same. Ranks that wait come first."""
    labels = _labels(evidence)
    same: dict[str, list[int]] = {}
    for rank in sorted(evidence, key=lambda rank: (evidence[rank].waiting_in is None, rank)):
        same.setdefault(_line(rank, evidence, labels, has_mismatch=mismatch is not None), []).append(rank)
    texts = []
    for text, ranks in same.items():
        age_s = later_s + min(_age_s(evidence[rank]) for rank in ranks)
        texts.append(f"{describe_ranks(ranks)}: {text}, for {age_s:.1f} s")
    return tuple(texts[:_MAX_LINES])


def _line(rank: int, evidence: Evidence, labels: Mapping[str, GroupLabel], *, has_mismatch: bool) -> str:
    one = evidence[rank]
    if one.waiting_in is None:
        return _doing(one)[1]
    awaited = () if has_mismatch else _awaited(rank, evidence)
    whom = f" for {describe_ranks(sorted(awaited))}" if awaited else ""
    return f"waiting{whom} in {describe_collective(one.waiting_in, labels)}"


def _age_s(one: RankEvidence) -> float:
    return one.waiting_in.age_s if one.waiting_in is not None else one.age_s


_KINDS = ("stopped", "disk", "loader", "user_code", "busy", "asleep")


def _rank_of_kind(one: RankEvidence) -> tuple[int, int]:
    return _KINDS.index(_doing(one)[0]), one.rank


def _doing(one: RankEvidence) -> tuple[str, str]:
    """What a rank does that waits in no collective: the kind of cause, and words for it."""
    at = f" at {one.place}" if one.place else ""
    match one.state, one.phase:
        case "T", _:
            return "stopped", "is stopped by a signal or a frozen cgroup"
        case "D", phase:
            return "disk", f"is stuck in the kernel while {PHASE_WORDS[phase]}{at}: a slow disk or network file system?"
        case _, WorkerPhase.SAVE:
            return "disk", f"is saving{at}: the disk or store is slow"
        case _, WorkerPhase.DATA:
            return "loader", _loader_words(one)
        case _, WorkerPhase.HOOK:
            return "user_code", f"is in a hook or in the loop's own code{at}"
    doing = PHASE_WORDS[one.phase]
    if one.sample is not None and one.sample.load >= _BUSY:
        return "busy", f"is busy{at} ({doing})"
    return "asleep", f"is asleep outside of any collective{at} ({doing})"


def _loader_words(one: RankEvidence) -> str:
    if one.reading:
        return f"waits for data: reading a sample at {one.reading} does not return"
    loaders = f"; its loader processes: {', '.join(one.loaders)}" if one.loaders else ""
    at = f" at {one.place}" if one.place and not loaders else ""
    return f"waits for data{at}{loaders}"

"""Do ranks wait for one that is slower, for all ranks of a slow host, or for a different rank in each step?

Ranks at the same place of the pipeline do the same work, so only those are compared. Invariant: a rank that waits for
others is never taken for a slow one: only its own work counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, stdev

from closeranks.core import phases
from closeranks.doctor.finding import Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts
from closeranks.facts.mesh import Mesh

_SLOW = 1.2
"""A rank is slow if its own work takes this many times as long as that of the others,"""
_LEAST_SLOW = 0.15
"""and the others wait for it this share of the time: ranks on one machine differ by a tenth at times."""
_LASTING = 4.0
"""Standard errors by which it is slower in the mean of all steps."""
_UNEVEN = 0.15
"""Steps of equal work differ less than this on a machine of their own."""
_STOPPED = 0.1
_KINDS = {
    phases.DATA: "reading its data",
    phases.HOST_TO_DEVICE: "copying batches to its device",
    phases.FORWARD: "computing",
    phases.BACKWARD: "computing",
    phases.OPTIMIZER: "computing",
    phases.SNAPSHOT: "copying its state",
    phases.SAVE: "writing checkpoints",
    phases.GC: "garbage collection",
    phases.USER_CODE: "hooks and the user's own loop",
}
_ADVICE = {
    "computing": "Look at what else runs on its host, at its clocks and temperature and at limits of its cgroup. "
    "elastic.stragglers = 'rebalance' gives a worker that stays slow less to do, 'evict' replaces it.",
    "reading its data": "Look at the disk or network that this host reads from.",
    "writing checkpoints": "Look at the disk or network that this host writes to.",
}


def find(facts: RunFacts) -> Iterator[Finding]:
    for ranks in _comparable(facts):
        slow = list(_straggler(facts, ranks))
        yield from slow or _uneven(facts, ranks)


def _comparable(facts: RunFacts) -> Sequence[Sequence[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    mesh = Mesh(facts.layout)
    for rank in facts.ranks:
        groups[mesh.coordinate(rank).pipeline].append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _straggler(facts: RunFacts, ranks: Sequence[int]) -> Iterator[Finding]:
    own = {rank: facts.own_by_rank[rank] for rank in ranks}
    worst = max(own, key=lambda rank: own[rank])
    slow = _slow_host(facts, own, worst) or (worst,)
    rest = [rank for rank in ranks if rank not in slow]
    others = median(own[rank] for rank in rest)
    gain = facts.share(own[worst] - others)
    if others <= 0 or own[worst] < _SLOW * others or gain < _LEAST_SLOW or not _is_lasting(facts, worst, rest):
        return
    excess = {name: facts.rank_s(worst, name) - median(facts.rank_s(rank, name) for rank in rest) for name in _KINDS}
    kind = _KINDS[max(excess, key=lambda name: excess[name])]
    changes = (SettingChange("elastic.stragglers", "evict", facts.setting("elastic.stragglers")),)
    who = f"Rank {worst} is" if len(slow) == 1 else f"The host of ranks {', '.join(map(str, slow))} is"
    yield Finding(
        "straggler",
        f"{who} slow: its own work takes {own[worst] / others:.2f} times as long as that of the others.",
        (
            f"{milliseconds(own[worst])} of a step of {milliseconds(facts.step_s)}, the others {milliseconds(others)}; "
            f"most of the difference is {kind}",
            f"the others wait {percent(gain)} of the time for it",
            *_why(facts, worst),
        ),
        _ADVICE.get(kind, "Find out why this rank spends longer there."),
        changes if kind == "computing" else (),
        gain,
    )


def _is_lasting(facts: RunFacts, rank: int, rest: Sequence[int]) -> bool:
    """Whether it is more than chance that this rank had more to do than the rest, over all steps."""
    steps = zip(facts.times[rank], *(facts.times[one] for one in rest), strict=True)
    gaps = [facts.own_s(own) - median(map(facts.own_s, others)) for own, *others in steps]
    return len(gaps) < 2 or fmean(gaps) >= _LASTING * stdev(gaps) / math.sqrt(len(gaps))


def _slow_host(facts: RunFacts, own: Mapping[int, float], worst: int) -> Sequence[int]:
    """The ranks of the worst rank's host, if each of them is slower than every rank of the other hosts."""
    host = next((numbers for numbers in facts.hosts if worst in numbers), ())
    inside = [rank for rank in host if rank in own]
    outside = [spent for rank, spent in own.items() if rank not in host]
    is_slow = len(inside) > 1 and outside and min(own[rank] for rank in inside) >= _SLOW * max(outside)
    return inside if is_slow else ()


def _why(facts: RunFacts, rank: int) -> Iterator[str]:
    """What the samples of its resources say about a slow rank."""
    periods = facts.used_mean(rank, "cgroup", "periods")
    stopped = facts.used_mean(rank, "cgroup", "throttled_periods") / periods if periods else 0.0
    if stopped > _STOPPED:
        limit = facts.used_mean(rank, "cgroup", "limit_cpus")
        yield f"a CPU limit of {limit:.3g} processors stopped it in {percent(stopped)} of the scheduling periods"
    waits = facts.used_mean(rank, "process", "run_wait_share")
    if waits > _STOPPED:
        yield f"it could run but had no processor {percent(waits)} of the time"
    if reasons := sorted({reason for one in facts.resources.get(rank, ()) for reason in one.gpu_throttled_by}):
        yield f"its device lowered its clocks: {', '.join(reasons)}"


def _uneven(facts: RunFacts, ranks: Sequence[int]) -> Iterator[Finding]:
    gaps, slowest = [], []
    for step in zip(*(facts.times[rank] for rank in ranks), strict=True):
        own = [facts.own_s(one) for one in step]
        gaps.append(max(own) - fmean(own))
        slowest.append(ranks[own.index(max(own))])
    gain = facts.share(fmean(gaps)) if gaps else 0.0
    if gain < _UNEVEN:
        return
    often = max(slowest.count(rank) for rank in ranks) / len(slowest)
    packed = SettingChange("data.packing", "documents", facts.setting("data.packing"))
    yield Finding(
        "uneven-batches",
        f"Ranks wait {percent(gain)} of the time because their work differs from step to step.",
        (
            f"in the mean of all steps the slowest rank works {milliseconds(fmean(gaps))} longer than the average, of "
            f"a step of {milliseconds(facts.step_s)}",
            f"it is not always the same one: the most frequent is the slowest in {percent(often)} of the steps",
        ),
        "Make batches equally expensive: samples of similar length together, or packed. If samples cost the same, "
        "something else uses these hosts from time to time.",
        (packed,) if facts.setting("data.name") == "tokens" and packed.now != packed.value else (),
        gain,
    )

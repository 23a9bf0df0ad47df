"""Do workers get less processor time than they could use: from a CPU limit, because of other programs, or because they
have more threads than there are processors?

The main thread of a worker that could run but has no processor shows as ``run_wait_share``; a limit of the control
group shows as throttled periods, and what the host uses beyond this run's processes is another program's.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from closeranks.doctor.finding import Finding, SettingChange, percent
from closeranks.doctor.run_facts import RunFacts

_WAITS = 0.10
"""The share of the time for which a worker must lack a processor."""
_THROTTLED = 0.20
"""The share of scheduling periods in which a limit stopped a control group."""
_NEIGHBOUR = 0.25
"""The share of a host's processors that other programs use."""
_LESS = 0.5
"""Fewer threads are expected to save this share of the waiting: a cautious guess."""
_EXPLAINED = frozenset({"uneven-batches", "exposed-communication"})


def find(facts: RunFacts) -> Iterator[Finding]:
    waits = {rank: facts.used_mean(rank, "process", "run_wait_share") for rank in facts.resources}
    if not waits:
        return
    worst = max(waits, key=lambda rank: waits[rank])
    usual = median_low(waits.values())
    if waits[worst] < _WAITS or usual < _WAITS / 2:  # one rank alone is a straggler
        return
    if _throttled(facts, worst) >= _THROTTLED:
        yield from _limited(facts, worst, waits[worst])
    else:
        yield from _neighbour(facts, worst, waits[worst])
        yield from _too_many_threads(facts, worst, waits[worst])


def _throttled(facts: RunFacts, rank: int) -> float:
    periods = facts.used_mean(rank, "cgroup", "periods")
    return facts.used_mean(rank, "cgroup", "throttled_periods") / periods if periods else 0.0


def _limited(facts: RunFacts, rank: int, waits: float) -> Iterator[Finding]:
    limit = facts.used_mean(rank, "cgroup", "limit_cpus")
    yield Finding(
        "cpu-limit",
        f"A CPU limit stops rank {rank} {percent(waits)} of the time.",
        (
            f"its control group may use {limit:.3g} processors and was stopped in {percent(_throttled(facts, rank))} "
            "of the scheduling periods",
        ),
        "Raise the limit of the container or control group, or use fewer threads and loader processes "
        "(run.threads, data.workers).",
        gain=waits,
        explains=_EXPLAINED,
    )


def _neighbour(facts: RunFacts, rank: int, waits: float) -> Iterator[Finding]:
    for host, (other_cpus, num_cpus) in facts.neighbours.items():
        if other_cpus < _NEIGHBOUR * num_cpus or rank not in facts.ranks_of_host(host):
            continue
        yield Finding(
            "noisy-neighbour",
            f"Other programs use {other_cpus:.2g} of the {num_cpus:.0f} processors of the host of rank {rank}.",
            (f"rank {rank} could run but had no processor {percent(waits)} of the time",),
            "Give the run a host or processors of its own: closeranks status shows the host.",
            gain=waits,
            explains=_EXPLAINED,
        )


def _too_many_threads(facts: RunFacts, rank: int, waits: float) -> Iterator[Finding]:
    threads, ranks = facts.setting("run.threads"), next((one for one in facts.hosts if rank in one), ())
    num_cpus = int(max((facts.used_mean(one, "host_wide", "num_cpus") for one in ranks), default=0.0))
    if not isinstance(threads, int) or not num_cpus or threads * len(ranks) <= num_cpus:
        return
    yield Finding(
        "too-many-threads",
        f"The workers of one host have {threads * len(ranks)} threads for {num_cpus} processors.",
        (
            f"run.threads = {threads}, on {len(ranks)} workers",
            f"rank {rank} could run but had no processor {percent(waits)} of the time",
        ),
        "Let all workers of a host together have as many threads as it has processors.",
        (SettingChange("run.threads", max(1, num_cpus // len(ranks)), threads),),
        _LESS * waits,
        _EXPLAINED,
    )

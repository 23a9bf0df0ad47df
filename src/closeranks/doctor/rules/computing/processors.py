"""Do workers get less processor time than they could use: from a CPU limit, or because of other programs?

The main thread of a worker that could run but has no processor shows as ``run_wait_share``; a limit of the control
group shows as throttled periods, and what the host uses beyond this run's processes is another program's.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from closeranks.doctor.finding import Finding, percent
from closeranks.doctor.run_facts import RunFacts

_WAITS = 0.10
"""The share of the time for which a worker must lack a processor."""
_THROTTLED = 0.20
"""The share of scheduling periods in which a limit stopped a control group."""
_NEIGHBOUR = 0.25
"""The share of a host's processors that other programs use."""
_EXPLAINED = frozenset({"uneven-batches", "exposed-communication"})


def find(facts: RunFacts) -> Iterator[Finding]:
    waits = {rank: facts.used_mean(rank, "process", "run_wait_share") for rank in facts.resources}
    if not waits:
        return
    worst = max(waits, key=lambda rank: waits[rank])
    usual = median_low(waits.values())
    if waits[worst] < _WAITS or usual < _WAITS / 2:  # one rank alone is a straggler
        return
    yield from (
        _limited(facts, worst, waits[worst])
        if _throttled(facts, worst) >= _THROTTLED
        else _neighbour(facts, worst, waits[worst])
    )


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

"""Does training wait for data, and which part of reading is slow?

A rank waits for a batch only while its readers take longer than its computation. With ``num`` workers they take a
``num``-th of the time, side by side. What the page cache does not hold is read from the disk: the kernel counts that
for each process, mapped files included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean

from closeranks.core.phases import DATA
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_MOST_WORKERS = 8
_HEADROOM = 0.8
"""Workers are chosen to need this share of the time that is there."""
_LEAST_ON_BUSY_HOST = 0.15
"""Where no processor is free, readers wait for one as everything else does: less than this says nothing about them."""
_DISK_BYTES_PER_S, _BUSY_DISK = 8 << 20, 0.5
"""Reading less than this from a disk that is less busy than this is not what takes the time."""
_MISSES = 0.5
"""The share of the bytes read that must come from the disk."""
_FROM_DISK = (
    "The page cache does not hold the data: use a faster disk, a host with more free memory, or smaller samples "
    "(closeranks data build). data.shuffle = 'blocks' reads neighbouring samples together. More data.workers help only "
    "if the disk serves several readers faster than one."
)
_HELP = {
    "reading": "Read ahead in more processes; data.shuffle = 'blocks' reads neighbouring samples together.",
    "fetching": "Fetch more at a time: more data.workers and data.prefetch hide the latency of the store.",
    "decoding": "Decode in more processes, or decode once and store the result (closeranks data build).",
    "collating": "Collate in more processes; samples of equal shape are stacked at once.",
}


def find(facts: RunFacts) -> Iterator[Finding]:
    waited = {rank: facts.rank_s(rank, DATA) for rank in facts.ranks}
    if not waited:
        return
    worst = max(waited, key=lambda rank: waited[rank])
    stages = _stages(facts)
    read_s = sum(stages.values())
    now = int(facts.setting("data.workers") or 0)
    busy_s = max(facts.step_s - waited[worst], 1e-9)
    workers = _enough_workers(read_s, busy_s, now)
    left = max(0.0, read_s / workers - busy_s) / facts.step_s if facts.step_s else 0.0
    gain, share, free = _saved_share(facts, waited) - left, facts.share(waited[worst]), 1 - facts.busy_cpus
    if gain < LEAST_GAIN or (free < LEAST_GAIN and share < _LEAST_ON_BUSY_HOST):
        return
    slowest = max(stages, key=lambda name: stages[name])
    advice = _HELP[slowest] if read_s else "Read ahead in more processes."
    from_disk = _from_disk(facts, worst) if slowest == "reading" else ""
    slowest, advice = ("reading from the disk", _FROM_DISK) if from_disk else (slowest, advice)
    if free < gain:  # what must be computed needs a processor
        gain = max(0.0, free)
        advice += f" The processors of this host are busy {percent(facts.busy_cpus)} of the time, so that gains less."
    evidence = [f"rank {worst} waits {milliseconds(waited[worst])} of a step of {milliseconds(facts.step_s)} for data"]
    if read_s:
        times = ", ".join(f"{name} {milliseconds(spent)}" for name, spent in stages.items() if spent)
        evidence.append(f"reading one step's samples takes rank 0: {times}")
    evidence += [from_disk] if from_disk else []
    yield Finding(
        "input-bound",
        f"Training waits for data {percent(share)} of the time" + (f", mostly for {slowest}." if read_s else "."),
        tuple(evidence),
        advice,
        () if from_disk else (SettingChange("data.workers", workers, now),),
        gain,
        frozenset({"straggler", "uneven-batches", "exposed-communication", "user-code"}),
    )


def _stages(facts: RunFacts) -> Mapping[str, float]:
    """Mean seconds per step that the readers of rank 0 spend on each stage."""
    steps = facts.steps
    if not steps:
        return {"reading": 0.0}
    return {
        "reading": fmean(step.data_read_s for step in steps),
        "fetching": fmean(step.data_fetch_s for step in steps),
        "decoding": fmean(step.data_decode_s for step in steps),
        "collating": fmean(step.data_collate_s for step in steps),
    }


def _from_disk(facts: RunFacts, rank: int) -> str:
    """What a rank and its readers get from the disk, in words; empty if they hardly read any."""
    disk, called = (facts.used_per_s(rank, "process", name) for name in ("read_bytes", "read_call_bytes"))
    called -= facts.sent_bytes_per_s(rank)  # sockets are read by the same calls, about as much as is sent
    share = disk / max(disk, called, 1.0)
    busy = _disk_busy_share(facts, rank)
    if (disk < _DISK_BYTES_PER_S and busy < _BUSY_DISK) or share < _MISSES:
        return ""
    words = f"; the busiest disk of its host is busy {percent(busy)} of the time" if busy else ""
    return f"rank {rank} reads {disk / 1e6:.3g} MB/s from the disk: the page cache misses {percent(share)}{words}"


def _disk_busy_share(facts: RunFacts, rank: int) -> float:
    host = next((numbers for numbers in facts.hosts if rank in numbers), ())
    return max((facts.used_mean(one, "host_wide", "disk_busy_share") for one in host), default=0.0)


def _enough_workers(read_s: float, busy_s: float, now: int) -> int:
    needed = math.ceil(read_s / (_HEADROOM * busy_s)) if read_s else 2
    return max(min(_MOST_WORKERS, needed), now + 1, 2)


def _saved_share(facts: RunFacts, waited: Mapping[int, float]) -> float:
    """The share of a step that is saved if no rank waits: the slowest rank sets the pace, with and without."""
    own = {rank: sum(map(facts.own_s, facts.times[rank])) / facts.num_steps for rank in facts.ranks}
    return facts.share(max(own.values()) - max(own[rank] - waited[rank] for rank in own))

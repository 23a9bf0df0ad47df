"""Does a host swap, so that workers wait for their memory?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding
from closeranks.doctor.run_facts import RunFacts

_LEAST_BYTES_PER_S = 1 << 20


def find(facts: RunFacts) -> Iterator[Finding]:
    for rank in facts.resources:
        rate = sum(facts.used_per_s(rank, "host_wide", name) for name in ("swap_in_bytes", "swap_out_bytes"))
        if rate < _LEAST_BYTES_PER_S:
            continue
        waits = facts.used_mean(rank, "host_wide", "io_wait_cpus") / max(
            1.0, facts.used_mean(rank, "host_wide", "num_cpus")
        )
        yield Finding(
            "swapping",
            f"The host of rank {rank} has too little memory: it swaps {rate / 2**20:.3g} MiB a second.",
            (f"{facts.used_mean(rank, 'process', 'major_faults'):.3g} page faults in a sample had to read a disk",),
            "Use fewer workers or data.workers there, a smaller train.micro_batch, or a layout that shards more.",
            gain=max(waits, LEAST_GAIN),
        )

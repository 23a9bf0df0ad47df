"""Does an accelerator run below its clocks, because of its power limit or its temperature?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, percent
from closeranks.doctor.run_facts import RunFacts

_BUSY = 0.5
"""A device that is idle lowers its clocks by itself."""


def find(facts: RunFacts) -> Iterator[Finding]:
    slow: dict[int, float] = {}
    for rank, used in facts.resources.items():
        clock, most = facts.used_mean(rank, "gpu", "sm_clock_mhz"), facts.used_mean(rank, "gpu", "sm_clock_max_mhz")
        is_busy = facts.used_mean(rank, "gpu", "utilization") >= _BUSY
        if most and is_busy and any(one.gpu_throttled_by for one in used):
            slow[rank] = 1 - clock / most
    if not slow:
        return
    worst = max(slow, key=lambda rank: slow[rank])
    reasons = Counter(reason for one in facts.resources[worst] for reason in one.gpu_throttled_by)
    if slow[worst] < LEAST_GAIN or not _is_fault(reasons):  # a power cap under large products is usual
        return
    yield Finding(
        "throttled-clocks",
        f"The device of rank {worst} runs {percent(slow[worst])} below its highest clock: "
        f"{reasons.most_common(1)[0][0]}.",
        (
            f"{facts.used_mean(worst, 'gpu', 'sm_clock_mhz'):.0f} of "
            f"{facts.used_mean(worst, 'gpu', 'sm_clock_max_mhz'):.0f} MHz, "
            f"at {facts.used_mean(worst, 'gpu', 'temperature_c'):.0f} °C",
        ),
        "Look at the cooling and the power supply of this host, or leave it out: its other devices may differ.",
        gain=slow[worst],
        explains=frozenset({"straggler"}),
    )


def _is_fault(reasons: Counter[str]) -> bool:
    return any(word in reason for reason in reasons for word in ("temperature", "hardware", "brake"))

"""Does the accelerator wait for its next kernel, because the host launches them one by one?

Known only from a trace (``closeranks profile``). Waiting for data and for batches shows in phases of their own, and is
not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import DATA, HOST_TO_DEVICE
from closeranks.doctor.finding import Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_LEAST = 0.10


def find(facts: RunFacts) -> Iterator[Finding]:
    if not facts.device_busy_s:
        return
    worst = min(facts.device_busy_s, key=lambda rank: facts.device_busy_s[rank])
    # Tracing makes a step longer, but not its kernels.
    idle = 1 - facts.share(facts.device_busy_s[worst])
    gain = idle - facts.share(facts.rank_s(worst, DATA, HOST_TO_DEVICE))
    if gain < _LEAST:
        return
    is_compiled, micro = facts.setting("train.compile"), facts.started.micro_batch
    larger = (SettingChange("train.micro_batch", 2 * micro, micro),) if facts.num_micro > 1 else ()
    yield Finding(
        "launch-bound",
        f"The device of rank {worst} is idle {percent(idle)} of the time, between kernels.",
        (
            f"kernels and copies take {milliseconds(facts.device_busy_s[worst])} of a step of "
            f"{milliseconds(facts.step_s)}, by the newest trace",
        ),
        "Launch fewer, larger kernels: compile the model, or compute more samples at once.",
        larger if is_compiled else (SettingChange("train.compile", True, is_compiled),),
        gain,
        frozenset({"no-compile", "small-micro-batch"}),
    )

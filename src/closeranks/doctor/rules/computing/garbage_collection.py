"""Does Python's garbage collection take too much of the time?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import GC
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_USUAL = 100


def find(facts: RunFacts) -> Iterator[Finding]:
    spent, every = facts.mean_s(GC), int(facts.setting("train.gc_every") or _USUAL)
    share = facts.share(spent)
    if share < LEAST_GAIN:
        return
    is_ours = every < _USUAL
    yield Finding(
        "garbage-collection",
        f"Python's garbage collection takes {percent(share)} of the time.",
        (f"{milliseconds(spent)} of a step of {milliseconds(facts.step_s)}, in the mean of all steps",),
        "Collect less often."
        if is_ours
        else "Do not call gc.collect() in hooks or the loop, and create fewer objects that refer to each other.",
        (SettingChange("train.gc_every", _USUAL, every),) if is_ours else (),
        share * (1 - every / _USUAL) if is_ours else share,
        frozenset({"user-code"}),
    )

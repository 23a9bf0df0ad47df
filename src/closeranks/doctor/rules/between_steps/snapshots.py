"""Do snapshots of the state in memory cost too much?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import SNAPSHOT
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_AUTO = 0.02
"""The share that "auto" lets snapshots take."""


def find(facts: RunFacts) -> Iterator[Finding]:
    spent = facts.mean_s(SNAPSHOT)
    share, every = facts.share(spent), facts.setting("elastic.snapshot_every")
    gain = share - float(facts.setting("elastic.snapshot_cost") or _AUTO)
    if gain < LEAST_GAIN:
        return
    yield Finding(
        "snapshot-cost",
        f"Copying the state into memory takes {percent(share)} of the time.",
        (f"{milliseconds(spent)} of a step of {milliseconds(facts.step_s)}; a snapshot is taken every {every} steps",),
        "Take snapshots as rarely as their cost requires: a fault then repeats a few more steps.",
        (SettingChange("elastic.snapshot_every", "auto", every),) if every != "auto" else (),
        gain,
    )

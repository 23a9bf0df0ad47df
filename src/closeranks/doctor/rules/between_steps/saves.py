"""Do checkpoints hold training up?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import SAVE
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_AIM = 0.02
"""The share of the time that saves may take."""


def find(facts: RunFacts) -> Iterator[Finding]:
    spent = facts.mean_s(SAVE)
    share, every = facts.share(spent), facts.setting("checkpoint.every")
    gain = share - _AIM
    if gain < LEAST_GAIN:
        return
    changes: tuple[SettingChange, ...] = ()
    if isinstance(every, int) and every > 0:
        changes = (SettingChange("checkpoint.every", every * round(share / _AIM), every),)
    yield Finding(
        "save-stalls",
        f"Saving checkpoints takes {percent(share)} of the time.",
        (f"{milliseconds(spent)} of a step of {milliseconds(facts.step_s)}; {len(facts.saves)} were saved",),
        "Save less often: faults are survived from memory, checkpoints are for the loss of all hosts. session.save() "
        "waits until the checkpoint is durable; the saves of checkpoint.every do not.",
        changes,
        gain,
        frozenset({"snapshot-cost", "straggler", "uneven-batches"}),
    )

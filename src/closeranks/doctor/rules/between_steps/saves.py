"""Do checkpoints hold training up, or take longer than the steps between them?"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from closeranks.core.phases import SAVE
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_AIM = 0.02
"""The share of the time that saves may take."""
_LATE = 1.5
"""Saves that take so many times as long as the steps between them are skipped often,"""
_REST = 2
"""and the steps between them should take so many times as long as one."""


def find(facts: RunFacts) -> Iterator[Finding]:
    yield from list(_stalls(facts)) or _late(facts)


def _stalls(facts: RunFacts) -> Iterator[Finding]:
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


def _late(facts: RunFacts) -> Iterator[Finding]:
    """Saves are written while training continues: one that comes due meanwhile is skipped, and costs no time."""
    every, taken = facts.setting("checkpoint.every"), [one.seconds for one in facts.saves if one.tier == "primary"]
    if not isinstance(every, int) or every <= 0 or not taken or not facts.step_s:
        return
    between_s, save_s = every * facts.step_s, median(taken)
    if save_s < _LATE * between_s:
        return
    enough = max(every + 1, round(_REST * save_s / facts.step_s))
    steps = "each step" if every == 1 else f"every {every} steps"
    yield Finding(
        "slow-saves",
        f"A checkpoint is due after {steps}, but takes {milliseconds(save_s)} to be complete.",
        (
            f"{milliseconds(between_s)} lie between two of them: those that come due meanwhile are skipped, "
            f"{len(taken)} of about {max(1, facts.num_steps // every)} were saved",
        ),
        "Save less often, or to a faster place.",
        (SettingChange("checkpoint.every", enough, every),),
    )

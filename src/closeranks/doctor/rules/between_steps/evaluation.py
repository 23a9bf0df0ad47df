"""Does evaluation take too much of the time?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import EVALUATION
from closeranks.doctor.finding import Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_LEAST_SHARE = 0.15
_AIM = 0.05
"""The share of the time that evaluations may take."""


def find(facts: RunFacts) -> Iterator[Finding]:
    spent, every = facts.mean_s(EVALUATION), facts.setting("train.eval_every")
    share = facts.share(spent)
    if share < _LEAST_SHARE or not isinstance(every, int) or not every:
        return
    # A rarer evaluation leaves s / factor of the share s, and everything else as it is.
    factor = 1 + round(share / (1 - share) * (1 - _AIM) / _AIM)
    yield Finding(
        "frequent-evaluation",
        f"Evaluation takes {percent(share)} of the time.",
        (f"{milliseconds(spent * every)} every {every} steps of {milliseconds(facts.step_s - spent)}",),
        "Evaluate less often, or on fewer samples (train.eval_samples).",
        (SettingChange("train.eval_every", every * factor, every),),
        share * (1 - 1 / factor),
    )

"""Are many steps skipped because fp16 gradients overflow?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import Finding, SettingChange, percent
from closeranks.doctor.run_facts import RunFacts

_MANY = 0.03
"""Growing the scale is meant to cost a step now and then."""


def find(facts: RunFacts) -> Iterator[Finding]:
    if facts.setting("train.precision") != "fp16" or not facts.steps:
        return
    skipped = sum(not step.taken for step in facts.steps)
    if (share := skipped / len(facts.steps)) < _MANY:
        return
    lowest = min((step.loss_scale for step in facts.steps if step.taken), default=1.0)
    yield Finding(
        "loss-scale",
        f"{percent(share)} of the steps are skipped: gradients overflow in fp16.",
        (
            f"{skipped} of {len(facts.steps)} steps were not taken",
            f"the loss scale fell to {lowest:g}, from {float(facts.setting('optim.loss_scale.init') or 0):g}",
        ),
        "Train in bf16, which needs no loss scale; or begin with a scale that held, and let it grow more rarely.",
        (SettingChange("train.precision", "bf16", "fp16"),),
        share,
        frozenset({"loss-values"}),
    )

"""Are activations recomputed although memory is free?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import FORWARD
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_RECOMPUTED = {"full": 0.9, "selective": 0.4}
"""The share of the forward pass that the backward pass computes again."""
_FREE = 4.0
"""Without recompute a step may need several times the memory; it must fit."""


def find(facts: RunFacts) -> Iterator[Finding]:
    mode = facts.setting("train.recompute")
    again_s = facts.mean_s(FORWARD) * _RECOMPUTED.get(str(mode), 0.0)
    gain = facts.share(again_s)
    if gain < LEAST_GAIN or facts.memory_room < _FREE:
        return
    yield Finding(
        "needless-recompute",
        f"Activations are recomputed although memory is free; that takes about {percent(gain)} of the time.",
        (
            f"train.recompute = '{mode}' computes about {milliseconds(again_s)} of a step of "
            f"{milliseconds(facts.step_s)} a second time",
            f"memory at its peak is {percent(1 / facts.memory_room)} of what there is",
        ),
        "Keep the activations. If memory becomes short, 'selective' recomputes only what is cheap.",
        (SettingChange("train.recompute", "none", mode),),
        gain,
    )

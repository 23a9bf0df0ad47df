"""Is the model compiled again and again, or not at all where that would pay?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import BACKWARD, COMPILE, FORWARD
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_FASTER = 0.2
"""The share of the computation that compiling a transformer saved on one H200."""


def find(facts: RunFacts) -> Iterator[Finding]:
    share = facts.share(facts.mean_s(COMPILE))
    if share >= LEAST_GAIN:
        yield Finding(
            "recompilation",
            f"The model is compiled again while it trains, {percent(share)} of the time.",
            (f"{milliseconds(facts.mean_s(COMPILE))} of a step of {milliseconds(facts.step_s)}, after the first step",),
            "Give the model tensors of few different shapes: pad or pack samples. TORCH_LOGS=recompiles names the "
            "cause.",
            gain=share,
        )
    elif not facts.is_cpu and facts.setting("train.compile") is False:
        gain = _FASTER * facts.share(facts.mean_s(FORWARD, BACKWARD))
        if gain >= LEAST_GAIN:
            yield Finding(
                "no-compile",
                "The model is not compiled.",
                (f"forward and backward are {percent(gain / _FASTER)} of the time",),
                "Compile each block; the first step then takes longer. The gain is that of a transformer on an H200.",
                (SettingChange("train.compile", True, False),),
                gain,
            )

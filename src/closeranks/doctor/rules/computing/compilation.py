"""Is the model compiled again and again, or not at all where that would pay?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import COMPILE
from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_FUSED = 0.5
"""Compiling saves about so much of what is not matrix products: on an H200 it saved 0.4 of that of a transformer of 1.5
billion parameters, and more than that of a small one."""
_FASTER = 0.2
"""The share of the computation that it saves if the speed of a matrix product is not known."""


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
        computing = facts.share(facts.computing_s)
        gain = computing * (_FUSED * (1 - facts.reached) if facts.reached else _FASTER)
        if gain >= LEAST_GAIN:
            yield Finding(
                "no-compile",
                "The model is not compiled.",
                (
                    f"forward and backward are {percent(computing)} of the time",
                    *_reached(facts),
                ),
                "Compile each block: kernels are fused, and the first step takes longer.",
                (SettingChange("train.compile", True, False),),
                gain,
            )


def _reached(facts: RunFacts) -> Iterator[str]:
    if facts.reached:
        yield f"they reach {percent(facts.reached)} of what a large matrix product reached here"

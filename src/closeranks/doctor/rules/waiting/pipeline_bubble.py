"""Do pipeline stages wait because a step has too few micro-batches?

The bubble of a schedule follows from its number of micro-batches (``facts.pipeline``); it is reported only if ranks
really wait about that long.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import PIPELINE, RunFacts
from closeranks.facts.pipeline.occupancy import pipeline_occupancy

_SEEN = 0.5
"""The share of the bubble that must show as waiting."""
_COST, _MOST_COST_S = 1 / 3, 0.02
"""Of the time that computing takes beyond arithmetic, so much is taken for a cost of each micro-batch, up to that of
some thousand kernels or calls of operators."""
_SMALL = 0.12
"""A bubble not worth shrinking further: smaller micro-batches compute less efficiently."""


def find(facts: RunFacts) -> Iterator[Finding]:
    layout, micro = facts.layout, facts.started.micro_batch
    if layout.pipeline == 1 or facts.num_micro < 1:
        return
    bubble = pipeline_occupancy(layout.pipeline, layout.schedule, facts.num_micro).bubble
    waited = sum(spent for name, spent in facts.phases.items() if name.startswith(PIPELINE))
    factor, smaller, gain = _best(facts, bubble, facts.share(waited))
    if bubble <= _SMALL or facts.share(waited) < _SEEN * bubble or gain < LEAST_GAIN:
        return
    changes = (SettingChange("train.micro_batch", micro // factor, micro),) if factor > 1 else ()
    advice = (
        f"Smaller micro-batches: with {facts.num_micro * factor} of them the bubble is {percent(smaller)}."
        if changes
        else "Give a step more micro-batches (train.global_batch), or use fewer stages: smaller ones would not pay."
    )
    yield Finding(
        "pipeline-bubble",
        f"Pipeline stages wait {percent(facts.share(waited))} of the time: a step has too few micro-batches.",
        (
            f"{layout.schedule} with {facts.num_micro} micro-batches over {layout.pipeline} ranks has a bubble of "
            f"{percent(bubble)}",
            f"ranks wait {milliseconds(waited)} of a step of {milliseconds(facts.step_s)} for another stage",
        ),
        advice,
        changes,
        gain,
        frozenset({"uneven-batches"}),
    )


def _best(facts: RunFacts, bubble: float, waited: float) -> tuple[int, float, float]:
    """Into how many parts to divide a micro-batch; the bubble then, and the share of a step that is saved. One part: it
    would not pay, and what is saved is for twice as many samples in a step."""

    def saved(factor: int) -> tuple[float, float]:
        smaller = pipeline_occupancy(facts.layout.pipeline, facts.layout.schedule, facts.num_micro * factor).bubble
        return smaller, min(1 - (1 - bubble) / (1 - smaller), waited)

    beyond_s = facts.computing_s * max(0.0, 1 - facts.reached) if facts.reached else 0.0
    cost_s = min(_COST * beyond_s / facts.num_micro, _MOST_COST_S)
    best, factor = (1, bubble, 0.0), 1
    while best[1] > _SMALL and facts.started.micro_batch % (2 * factor) == 0:
        factor *= 2
        smaller, gain = saved(factor)
        gain -= facts.share(facts.num_micro * (factor - 1) * cost_s)
        if gain < max(best[2], LEAST_GAIN):
            break
        best = factor, smaller, gain
    return best if best[0] > 1 else (1, bubble, saved(2)[1])

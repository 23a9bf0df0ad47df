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
_SMALL = 0.12
"""A bubble not worth shrinking further: smaller micro-batches compute less efficiently."""


def find(facts: RunFacts) -> Iterator[Finding]:
    layout, micro = facts.layout, facts.started.micro_batch
    if layout.pipeline == 1 or facts.num_micro < 1:
        return
    bubble = pipeline_occupancy(layout.pipeline, layout.schedule, facts.num_micro).bubble
    waited = sum(spent for name, spent in facts.phases.items() if name.startswith(PIPELINE))
    factor, smaller = 1, bubble
    while smaller > _SMALL and micro % (2 * factor) == 0:
        factor *= 2
        smaller = pipeline_occupancy(layout.pipeline, layout.schedule, facts.num_micro * factor).bubble
    gain = min(1 - (1 - bubble) / (1 - smaller), facts.share(waited))
    if facts.share(waited) < _SEEN * bubble or gain < LEAST_GAIN:
        return
    yield Finding(
        "pipeline-bubble",
        f"Pipeline stages wait {percent(facts.share(waited))} of the time: a step has too few micro-batches.",
        (
            f"{layout.schedule} with {facts.num_micro} micro-batches over {layout.pipeline} ranks has a bubble of "
            f"{percent(bubble)}",
            f"ranks wait {milliseconds(waited)} of a step of {milliseconds(facts.step_s)} for another stage",
        ),
        f"Smaller micro-batches: with {facts.num_micro * factor} of them the bubble is {percent(smaller)}.",
        (SettingChange("train.micro_batch", micro // factor, micro),),
        gain,
        frozenset({"uneven-batches"}),
    )

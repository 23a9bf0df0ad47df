"""Reports whether the data keeps up with the steps, and if not, which stage is slow.

A step waits for data only when its readers are slower than its computation; then the stage that takes most of their
time is named, with what would help. Pure: steps in, one sentence out.
"""

from __future__ import annotations

from collections.abc import Sequence

from closeranks.core.events import StepDone
from closeranks.telemetry import formatting

_NOTICED = 0.02
"""A share of the steps' time below which no action is needed."""
_HELP = {
    "reading": "more data.workers read in parallel, data.shuffle = 'blocks' reads neighbouring samples together",
    "fetching": "more data.prefetch, data.shuffle = 'blocks' or a larger data.cache_bytes hide the latency",
    "decoding": "more data.workers decode in parallel",
    "collating": "more data.workers work in parallel, and samples of equal shape are stacked at once",
}


def data_wait(steps: Sequence[StepDone]) -> str:
    """How much of these steps' time was spent waiting for data, and which stage was slow."""
    seconds = sum(step.seconds for step in steps)
    if seconds <= 0:
        return ""
    waited = sum(step.data_wait_s for step in steps) / seconds
    text = f"{formatting.percent(waited)} of the steps' time"
    stages = stage_seconds(steps)
    slowest = max(stages, key=lambda name: stages[name])
    if waited < _NOTICED or stages[slowest] == 0:
        return text
    times = ", ".join(f"{name} {1000 * spent / len(steps):.3g} ms" for name, spent in stages.items() if spent > 0)
    return f"{text}: {slowest} takes longest (a step: {times}). To wait less: {_HELP[slowest]}"


def stage_seconds(steps: Sequence[StepDone]) -> dict[str, float]:
    """Time that the readers of rank 0 spent on each stage, over all of these steps."""
    return {
        "reading": sum(step.data_read_s for step in steps),
        "fetching": sum(step.data_fetch_s for step in steps),
        "decoding": sum(step.data_decode_s for step in steps),
        "collating": sum(step.data_collate_s for step in steps),
    }

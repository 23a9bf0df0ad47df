"""Are micro-batches too small for the device to compute efficiently?

A forward and backward has a cost that does not depend on its samples (launching kernels, Python, collectives of each
unit). It is reported if the computation stays far below what a large product reached on this device, although several
micro-batches follow one another that could be one. Of a user's module the FLOPs are often not known: then it is
reported only for very few samples, in a time that such a cost alone may take.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts
from closeranks.facts.layout import pluralize

_LOW, _LOW_ON_CPU = 0.2, 0.06
"""Computing below this share of the measured peak is limited by something other than arithmetic."""
_MOST_COST_S, _MOST_COST_ON_CPU_S = 0.02, 0.003
"""What a micro-batch may cost beyond arithmetic: some thousand kernels or calls of operators."""
_FEW, _FEW_ON_CPU = (64, 8192), 16
"""Samples, or tokens, with which a matrix product is still small."""
_VERY_FEW, _SHORT_S, _SHORT_ON_CPU_S = 4, 0.02, 0.01
"""Samples of a micro-batch, and the time it takes, where the FLOPs are not known."""
_MOST = 8
"""Micro-batches are joined at most so many at a time: memory grows as fast."""
_FULL = 0.75
"""A micro-batch may grow as long as memory stays below this share of the device's."""


def find(facts: RunFacts) -> Iterator[Finding]:
    started = facts.started
    if facts.layout.pipeline > 1 or facts.num_micro < 2 or not facts.steps:
        return
    if _items_in_one(facts) > (_FEW_ON_CPU if facts.is_cpu else _FEW[started.item == "token"]):
        return
    factor = _joined(facts)
    # A factor-th of the cost per micro-batch remains.
    gain = facts.share(_cost_s(facts)) * (1 - 1 / factor)
    if factor < 2 or gain < LEAST_GAIN:
        return
    micro = started.micro_batch
    yield Finding(
        "small-micro-batch",
        f"Micro-batches of {pluralize(micro, 'sample')} are too small: {_reason(facts)}.",
        (
            f"{facts.num_micro} micro-batches follow one another in a step, {milliseconds(facts.computing_s)} of "
            f"{milliseconds(facts.step_s)}",
            _evidence(facts),
        ),
        "Compute more samples at once. Losses change only by rounding.",
        (SettingChange("train.micro_batch", micro * factor, micro),),
        gain,
    )


def _cost_s(facts: RunFacts) -> float:
    """What the micro-batches of a step cost beyond their arithmetic."""
    if facts.reached:  # what is far from the peak is taken for such cost, up to what that can be
        low, most_s = (_LOW_ON_CPU, _MOST_COST_ON_CPU_S) if facts.is_cpu else (_LOW, _MOST_COST_S)
        return min(facts.computing_s * (1 - facts.reached / low), facts.num_micro * most_s)
    waits = max((facts.used_mean(rank, "process", "run_wait_share") for rank in facts.resources), default=0.0)
    undisturbed_s = facts.computing_s * (1 - waits) / facts.num_micro
    is_short = undisturbed_s <= (_SHORT_ON_CPU_S if facts.is_cpu else _SHORT_S)
    return facts.computing_s if facts.started.micro_batch <= _VERY_FEW and is_short else 0.0


def _reason(facts: RunFacts) -> str:
    if facts.reached:
        return f"computing reaches {percent(facts.reached)} of the device's peak"
    return f"each takes {milliseconds(facts.computing_s / facts.num_micro)}, most of it whatever its size"


def _evidence(facts: RunFacts) -> str:
    if not facts.reached:
        return "how much of that is arithmetic is not known: telemetry.count_flops = true counts it"
    peak = facts.started.measured_flops or 0.0
    gigas = f"{facts.reached * peak / 1e9:.4g}"
    return f"a large matrix product reached {peak / 1e9:.4g} GFLOP/s here, the model {gigas}"


def _items_in_one(facts: RunFacts) -> float:
    """Tokens or samples of one micro-batch."""
    items = sum(step.items for step in facts.steps) / len(facts.steps)
    return items * facts.started.micro_batch / max(1, facts.started.global_batch)


def _joined(facts: RunFacts) -> int:
    """How many micro-batches fit into one: a power of two, by number and by memory."""
    factor = 1
    room = facts.memory_room
    while factor < _MOST and facts.num_micro % (2 * factor) == 0 and room * _FULL > 2 * factor:
        factor *= 2
    return factor

"""Are micro-batches too small for the device to compute efficiently?

A forward and backward has a cost that does not depend on its samples (launching kernels, Python, collectives of each
unit). It is reported if the computation stays far below what a large product reached on this device, although several
micro-batches follow one another that could be one.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_LOW, _LOW_ON_CPU = 0.2, 0.06
"""Computing below this share of the measured peak is limited by something other than arithmetic."""
_MOST_COST_S, _MOST_COST_ON_CPU_S = 0.02, 0.003
"""What a micro-batch may cost beyond arithmetic: some thousand kernels or calls of operators."""
_FEW, _FEW_ON_CPU = (64, 8192), 16
"""Samples, or tokens, with which a matrix product is still small."""
_MOST = 8
"""Micro-batches are joined at most so many at a time: memory grows as fast."""
_FULL = 0.75
"""A micro-batch may grow as long as memory stays below this share of the device's."""


def find(facts: RunFacts) -> Iterator[Finding]:
    started, peak, reached = facts.started, facts.started.measured_flops, facts.reached
    if not peak or not reached or facts.layout.pipeline > 1 or facts.num_micro < 2:
        return
    if _items_in_one(facts) > (_FEW_ON_CPU if facts.is_cpu else _FEW[started.item == "token"]):
        return
    factor, low = _joined(facts), _LOW_ON_CPU if facts.is_cpu else _LOW
    # What is far from the peak is taken for cost per micro-batch, up to what that can be; a factor-th of it remains.
    far_s = facts.computing_s * (1 - reached / low)
    gain = facts.share(min(far_s, facts.num_micro * _most_cost_s(facts))) * (1 - 1 / factor)
    if factor < 2 or gain < LEAST_GAIN:
        return
    micro = started.micro_batch
    yield Finding(
        "small-micro-batch",
        f"Micro-batches of {micro} samples are too small: computing reaches {percent(reached)} of the device's peak.",
        (
            f"{facts.num_micro} micro-batches follow one another in a step, {milliseconds(facts.computing_s)} of "
            f"{milliseconds(facts.step_s)}",
            f"a large matrix product reached {peak / 1e9:.4g} GFLOP/s here, the model {reached * peak / 1e9:.4g}",
        ),
        "Compute more samples at once. Losses change only by rounding.",
        (SettingChange("train.micro_batch", micro * factor, micro),),
        gain,
    )


def _items_in_one(facts: RunFacts) -> float:
    """Tokens or samples of one micro-batch."""
    items = sum(step.items for step in facts.steps) / len(facts.steps)
    return items * facts.started.micro_batch / max(1, facts.started.global_batch)


def _most_cost_s(facts: RunFacts) -> float:
    return _MOST_COST_ON_CPU_S if facts.is_cpu else _MOST_COST_S


def _joined(facts: RunFacts) -> int:
    """How many micro-batches fit into one: a power of two, by number and by memory."""
    factor = 1
    room = facts.memory_room
    while factor < _MOST and facts.num_micro % (2 * factor) == 0 and room * _FULL > 2 * factor:
        factor *= 2
    return factor

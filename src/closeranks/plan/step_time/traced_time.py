"""How long does one rank compute on a traced module, per micro-batch?

The blocks of a trace are averaged; what lies outside them is one unit at the end. Invariant: every traced operation is
counted once, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit
from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time.block_time import BlockTime
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.workload import PlanChoice

_COMPILED_SHARE = 0.35
"""Of the bytes that unfused operations move, what is left when they are compiled into one another."""


class TracedTimer:
    """Times a traced module; a ``BlockTimer``."""

    def __init__(self, trace: ModuleTrace, seq_len: int, times: OperationTimes) -> None:
        self._seq_len, self._times = seq_len, times
        blocks = [unit for unit in trace.units if unit.is_block]
        self._blocks = blocks or list(trace.units)
        self._num_blocks = len(blocks) or 1
        self._rest = [unit for unit in trace.units if not unit.is_block] if blocks else []

    def tokens(self, choice: PlanChoice) -> int:
        return choice.micro_batch * self._seq_len

    def block(self, choice: PlanChoice, *, is_expert: bool) -> BlockTime:
        whole = self._time(self._blocks, choice)
        share = 1 / self._num_blocks
        parts = (whole.products, whole.attention, whole.memory)
        products, attention, memory = (ForwardBackward(share * one.forward, share * one.backward) for one in parts)
        return BlockTime(products, attention, memory)

    def head(self, choice: PlanChoice) -> BlockTime:
        return self._time(self._rest, choice)

    def embedding_s(self, choice: PlanChoice) -> float:
        return 0.0

    def _time(self, units: Sequence[TracedUnit], choice: PlanChoice) -> BlockTime:
        products = ForwardBackward(
            sum(self._product(one, choice) for unit in units for one in unit.products),
            sum(self._product(one, choice) for unit in units for one in unit.backward_products),
        )
        device, samples = self._times.cluster.device, choice.micro_batch
        flops = samples * sum(unit.attention_flops for unit in units)
        peak = device.peak(choice.precision if choice.precision != "fp8" else "bf16")
        attention = ForwardBackward(
            flops / (peak * device.attention_forward), 2.5 * flops / (peak * device.attention_backward)
        )
        fused = _COMPILED_SHARE if choice.compiled else 1.0
        fixed = sum(unit.fixed_moved_bytes for unit in units)
        forward = self._times.moved(fused * samples * sum(unit.moved_bytes for unit in units) + fixed / 2)
        backward = self._times.moved(fused * samples * sum(unit.backward_moved_bytes for unit in units) + fixed / 2)
        return BlockTime(products, attention, ForwardBackward(forward, backward))

    def _product(self, traced: Product, choice: PlanChoice) -> float:
        one = traced.for_samples(choice.micro_batch)
        return self._times.product(one.m, one.n, one.k, choice, count=one.count)

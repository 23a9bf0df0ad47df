"""How long does one operation take on a device: as it was measured there, else as it is modelled?

Invariant: what a calibration holds counts; what it does not hold is modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from closeranks.facts.cluster import Cluster
from closeranks.facts.timing.attention import (
    AttentionShape,
    ForwardBackward,
    fused_attention_seconds,
    unfused_attention_seconds,
)
from closeranks.facts.timing.memory_bound import moved_seconds
from closeranks.facts.timing.products import product_seconds
from closeranks.plan.step_time.constants import Constants
from closeranks.plan.step_time.measured_times import MeasuredTimes, measured_times
from closeranks.plan.step_time.workload import PlanChoice

_OPTIMIZER_BYTES = {"adamw": 34.0, "lamb": 46.0, "sgd": 20.0, "lars": 32.0}
"""Moved per parameter: weight, gradient and moments read, weight and moments written, the norm of all gradients, a copy
in 16 bits."""


@dataclass(frozen=True)
class OperationTimes:
    cluster: Cluster
    constants: Constants

    @cached_property
    def measured(self) -> MeasuredTimes | None:
        return measured_times(self.cluster)

    def product(self, m: int, n: int, k: int, choice: PlanChoice, precision: str = "", count: int = 1) -> float:
        precision = precision or choice.precision
        if self.measured and (one_s := self.measured.product_s(m, n, k, precision)) is not None:
            return count * one_s
        modelled_s = product_seconds(m, n, k, self.cluster.device, precision, self.constants.products, count)
        return modelled_s / (self.cluster.device.sustained or self.constants.products.sustained)

    def attention(self, shape: AttentionShape, choice: PlanChoice) -> ForwardBackward:
        device, constants = self.cluster.device, self.constants
        if not choice.fused_attention:
            return unfused_attention_seconds(shape, device, choice.precision, constants.attention, constants.products)
        if self.measured and (found := self.measured.attention_s(shape, choice.precision)) is not None:
            return found
        best = fused_attention_seconds(shape, device, choice.precision, constants.attention)
        speed = constants.of(choice.software).attention
        return ForwardBackward(best.forward / speed, best.backward / speed)

    def moved(self, num_bytes: float) -> float:
        """Of element-wise operations that read and write this many bytes."""
        return moved_seconds(num_bytes, self.cluster.device, self.constants.memory)

    def moved_in_block(self, num_bytes: float, choice: PlanChoice) -> float:
        """Of the element-wise operations of a block's forward, as the software runs them."""
        if self.measured and (found := self.measured.moved_s(num_bytes, is_compiled=choice.compiled)) is not None:
            return found
        return self.moved(num_bytes) * (1.0 if choice.compiled else self.constants.of(choice.software).eager_passes)

    def update(self, num_params: float, optimizer: str) -> float:
        """Of the optimizer."""
        if self.measured and (found := self.measured.optimizer_s(num_params)) is not None:
            return found
        return self.moved(num_params * _OPTIMIZER_BYTES.get(optimizer, 34.0))

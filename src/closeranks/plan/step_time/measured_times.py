"""How long do the operations of a worker take on a machine that was measured (``closeranks plan calibrate``)?

Measured times of a worker alone, slowed down by those beside it on its host, and corrected by what whole steps took.
Invariant: what was not measured gives None, and the caller falls back on the datasheet.
"""

from __future__ import annotations

from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import Cluster
from closeranks.facts.timing.attention import AttentionShape, ForwardBackward

PRODUCTS, ATTENTION, MEMORY_BOUND, OPTIMIZER = (
    "compute: products",
    "compute: attention",
    "compute: memory-bound",
    "optimizer",
)
DATA, TENSOR, SENDS = "data communication", "tensor communication", "pipeline sends"
_PASSES = 8
"""Operations among which the bytes of a block's memory-bound part are divided: a small pass fits the caches."""
FORWARD_OPERATIONS = 80
"""Of a block."""


def memory_bound_name(*, is_compiled: bool) -> str:
    """Under which name its correction is kept: fused operations make other passes than those that are counted."""
    return f"{MEMORY_BOUND}, compiled" if is_compiled else MEMORY_BOUND


class MeasuredTimes:
    """The times of one of several workers on a host."""

    def __init__(self, calibration: Calibration, num_workers: int) -> None:
        self._calibration, self._slowdown = calibration, calibration.slowdown(num_workers)
        # A single worker has all cores, which its overheads do not use.
        self._crowding = calibration.crowding(num_workers)

    def product_s(self, m: int, n: int, k: int, precision: str) -> float | None:
        return self._times(
            self._calibration.product_s(m, n, k, precision), self._slowdown.products * self._correction(PRODUCTS)
        )

    def attention_s(self, shape: AttentionShape, precision: str) -> ForwardBackward | None:
        """None for a shard of the positions and for attention that is not causal, which are not measured."""
        if shape.num_queries != shape.num_keys or not shape.is_causal:
            return None
        sizes = (shape.batch, shape.num_heads, shape.num_queries, shape.head_dim, precision)
        forward = self._calibration.attention_s(*sizes)
        backward = self._calibration.attention_s(*sizes, backward=True)
        if forward is None or backward is None:
            return None
        factor = self._slowdown.products * self._correction(ATTENTION)
        return ForwardBackward(factor * forward, factor * backward)

    def moved_s(self, num_bytes: float, *, is_compiled: bool) -> float | None:
        """Memory-bound operations of a block that move this many bytes together."""
        each = self._calibration.memory_s(num_bytes / _PASSES)
        factor = self._slowdown.memory * self._correction(memory_bound_name(is_compiled=is_compiled))
        return self._times(each, _PASSES * factor)

    def optimizer_s(self, num_params: float) -> float | None:
        return self._times(
            self._calibration.optimizer_s(num_params), self._slowdown.memory * self._correction(OPTIMIZER)
        )

    def step_overhead_s(self) -> float | None:
        return self._times(self._calibration.step_overhead_s, self._crowding)

    def micro_overhead_s(self, model_share: float) -> float | None:
        """``model_share``: the share of the model's blocks that the worker runs for each micro-batch."""
        return self._times(self._calibration.micro_batch_overhead_s, self._crowding * model_share)

    def selective_s(self, num_blocks: int) -> float:
        """What selective recompute adds to a forward of blocks that are not compiled."""
        return self._crowding * num_blocks * FORWARD_OPERATIONS * self._calibration.selective_op_s

    def wait_s(self, compute_s: float) -> float:
        """For the last rank, where ranks meet after they have computed for so long."""
        return self._calibration.wait_share * compute_s

    def shown(self, part: str) -> float:
        """How much of the communication of a part shows in a step, relative to its estimate."""
        return self._correction(part) if part in (DATA, TENSOR, SENDS) else 1.0

    def _correction(self, part: str) -> float:
        return self._calibration.correction(part)

    @staticmethod
    def _times(seconds: float | None, factor: float) -> float | None:
        return None if seconds is None else seconds * factor


def measured_times(cluster: Cluster) -> MeasuredTimes | None:
    """None for a cluster whose devices were not measured."""
    return None if cluster.calibration is None else MeasuredTimes(cluster.calibration, cluster.devices_on_host)

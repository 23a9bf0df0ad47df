"""How long does the attention of one block take: the two products over the sequence, and the softmax between them?

Fused kernels (FlashAttention, cuDNN) keep the scores on the chip and skip the masked half of causal ones; without them
the scores of all pairs are written to memory and read again by every operation between the products. Invariant: the
time is never below the executed operations at the device's attention speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.device_table import Device
from closeranks.facts.timing.products import ProductModel, product_seconds

_BACKWARD_PRODUCTS = 2.5
"""A fused backward computes five products, one of them the scores again; forward computes two."""


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Constants of the model."""

    small_heads: float = 0.85
    """Speed of a fused kernel with heads of 64 relative to heads of 128."""
    unfused_forward_bytes: float = 8.0
    """Moved per score in 16 bits between the products: read and written by scale, mask and softmax in one kernel, which
    skips much of the masked half, and by dropout with its mask."""
    unfused_backward_bytes: float = 10.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one micro-batch on one rank."""

    batch: int
    num_heads: int
    head_dim: int
    num_queries: int
    num_keys: int
    is_causal: bool = True

    @property
    def forward_flops(self) -> float:
        """Every query with every key."""
        return 4.0 * self.batch * self.num_heads * self.head_dim * self.num_queries * self.num_keys


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    forward: float
    backward: float


def fused_attention_seconds(
    shape: AttentionShape, device: Device, precision: str, model: AttentionModel
) -> ForwardBackward:
    executed = shape.forward_flops * (0.5 if shape.is_causal else 1.0)
    size = min(1.0, model.small_heads ** ((128 - shape.head_dim) / 64)) if shape.head_dim < 128 else 1.0
    peak = device.peak(precision if precision != "fp8" else "bf16")
    if device.kind == "cpu":
        size, peak = 1.0, device.reachable(precision)
    forward = executed / (peak * device.attention_forward * size)
    return ForwardBackward(forward, _BACKWARD_PRODUCTS * executed / (peak * device.attention_backward * size))


def unfused_attention_seconds(
    shape: AttentionShape, device: Device, precision: str, model: AttentionModel, products: ProductModel
) -> ForwardBackward:
    """Two batched products forward, four backward, and the scores of all pairs moved through memory between them."""
    precision = "bf16" if precision == "fp8" else precision
    width = 4 if precision in ("fp32", "tf32") else 2
    count = shape.batch * shape.num_heads
    queries, keys, size = shape.num_queries, shape.num_keys, shape.head_dim
    scores = product_seconds(queries, keys, size, device, precision, products, count)
    values = product_seconds(queries, size, keys, device, precision, products, count)
    cells = float(count) * queries * keys * width / 2
    return ForwardBackward(
        scores + values + cells * model.unfused_forward_bytes / device.memory_bytes_per_s,
        2 * (scores + values) + cells * model.unfused_backward_bytes / device.memory_bytes_per_s,
    )

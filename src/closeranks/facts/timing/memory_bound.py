"""How long do the operations of a block take that move bytes and compute little: norms, activations, residuals?

Counted in bytes that a perfectly fused kernel of each operation must move; unfused kernels make more passes. Invariant:
bytes follow from the shape alone, seconds from the memory bandwidth alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.device_table import Device
from closeranks.facts.shapes.transformer import TransformerShape


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Constants of the model."""

    reachable: float = 0.85
    """Share of the memory bandwidth that a large element-wise kernel reaches."""
    backward: float = 1.7
    """Bytes of the backward of these operations relative to their forward."""


def moved_seconds(num_bytes: float, device: Device, model: MemoryModel) -> float:
    return num_bytes / (device.memory_bytes_per_s * model.reachable)


def block_forward_bytes(
    shape: TransformerShape,
    num_tokens: float,
    width: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = True,
    is_fused: bool = True,
) -> float:
    """Bytes one rank moves in the forward of a dense block: two norms and two residuals on its positions (all of them
    without sequence parallelism), the activation and the rotation of queries and keys on its columns.

    Without fusion the norm of a gated model (RMS) and the rotation are several operations in float32, and gate and
    product two; layer norm and GELU are one kernel each in any case.
    """
    rows = shape.attention_dim + shape.kv_dim
    norm, inner = 2.0, 2.0 * shape.ffn_dim
    if shape.gated:
        norm, inner = (2.0, 3.0 * shape.ffn_dim + 2 * rows) if is_fused else (16.0, 5.0 * shape.ffn_dim + 10 * rows)
    positions = num_tokens / tensor if sequence_parallel else num_tokens
    return width * (positions * shape.dim * (2 * norm + 2 * 3) + num_tokens / tensor * inner)


def head_bytes(shape: TransformerShape, num_tokens: float, *, tensor: int = 1, is_fused: bool = False) -> float:
    """Bytes that the loss moves, forward and backward, over its part of the vocabulary: fused, logits are read twice
    and their gradient is written and read; otherwise float32 copies are made on the way."""
    per_logit = 10 if is_fused else 26
    return num_tokens * shape.vocab_size / tensor * per_logit

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
    shape: TransformerShape, num_tokens: float, width: int, *, tensor: int = 1, sequence_parallel: bool = True
) -> float:
    """Bytes one rank moves in the forward of a dense block: two norms and two residuals on its positions (all of them
    without sequence parallelism), the activation and the position rotation on its columns."""
    positions = num_tokens / tensor if sequence_parallel else num_tokens
    stream = positions * shape.dim * (2 * 2 + 2 * 3)
    inner = 3 * shape.ffn_dim + 2 * (shape.attention_dim + shape.kv_dim) if shape.gated else 2 * shape.ffn_dim
    return width * (stream + num_tokens / tensor * inner)


def head_bytes(shape: TransformerShape, num_tokens: float, *, tensor: int = 1, is_fused: bool = False) -> float:
    """Bytes that the loss moves, forward and backward, over its part of the vocabulary: fused, logits are read twice
    and their gradient is written and read; otherwise float32 copies are made on the way."""
    per_logit = 10 if is_fused else 26
    return num_tokens * shape.vocab_size / tensor * per_logit

"""Explains what took the memory when it ran out, and what can be changed. Pure: sizes in, text out.

Invariant: parts add up to what was in use; what cannot be attributed is reported together, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.telemetry import formatting

_LARGEST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class TensorSize:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One device's memory at the moment an allocation failed; zero for figures that are not available."""

    device: str
    in_use_bytes: int
    total_bytes: int
    requested_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    largest: tuple[TensorSize, ...] = ()
    is_float32: bool = False
    """Whether the parameters are float32: the one case in which another precision is worth recommending."""

    @property
    def state_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def rest_bytes(self) -> int:
        return max(0, self.in_use_bytes - self.state_bytes)


def explain(use: MemoryUse) -> str:
    """A message for the user whose run ran out of memory: what took it, the largest tensors, what to change."""
    rows = [f"{_headline(use)} This process held {formatting.size(use.in_use_bytes)} of it:"]
    parts = (
        ("parameters", use.parameters_bytes),
        ("gradients", use.gradients_bytes),
        ("optimizer state", use.optimizer_bytes),
        ("activations, buffers, other", use.rest_bytes),
    )
    width = max(len(label) for label, _ in parts)
    rows += [f"  {label:<{width}}  {formatting.size(num_bytes):>9}" for label, num_bytes in parts]
    largest = sorted(use.largest, key=lambda tensor: -tensor.bytes)[:_LARGEST_SHOWN]
    if largest:
        named = ", ".join(f"{tensor.name} ({formatting.size(tensor.bytes)})" for tensor in largest)
        rows.append(f"Largest parameters: {named}.")
    return "\n".join([*rows, "To fit, most effective first:", *(f"  - {change}" for change in advice(use))])


def _headline(use: MemoryUse) -> str:
    total = f" ({formatting.size(use.total_bytes)} in all)" if use.total_bytes else ""
    wanted = f" when {formatting.size(use.requested_bytes)} more was requested" if use.requested_bytes else ""
    return f"{use.device} ran out of memory{total}{wanted}."


def advice(use: MemoryUse) -> Sequence[str]:
    """What to change, the largest part first."""
    batch = [
        "halve train.micro_batch: activations halve with it, while train.global_batch and the learning rate stay",
        "shorten data.seq_len: activations shrink with it",
    ]
    precision = ['train.precision = "bf16": activations take about half'] if use.is_float32 else []
    batch.insert(1, 'train.recompute = "full": a block keeps only its inputs, and is computed twice')
    spread = ["layout.zero = 3 on several workers: each keeps its share of parameters, gradients and optimizer state"]
    state = [*spread, "choose a smaller model.preset: parameters, gradients and optimizer state all shrink with it"]
    if use.optimizer_bytes > use.parameters_bytes:
        state.append('optim.name = "sgd": half of the optimizer state that adamw keeps')
    if use.rest_bytes >= use.state_bytes:
        return [batch[0], *precision, *batch[1:], state[0]]
    return [*state, *precision, *batch]

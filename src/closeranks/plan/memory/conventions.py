"""How many bytes does training keep per parameter? The conventions, and how ZeRO divides them.

Mixed precision with float32 master weights keeps 16 bytes: 2 of a weight, 2 of its gradient, and 12 of the optimizer
(master weight and two moments). Lean states do without the master weights: 12. This package keeps 16 as well, but all
in float32: 4, 4 and 8. Invariant: what a convention keeps per parameter, undivided, is ``StateConvention.total``.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.registry import did_you_mean


@dataclass(frozen=True, slots=True)
class StateConvention:
    """Bytes per parameter, with an optimizer of two moments (AdamW)."""

    name: str
    weight: int
    gradient: int
    master: int
    """A second, more precise copy of the weight, which the optimizer updates."""
    moments: int = 8
    has_early_gradients: bool = False
    """Whether gradients are allocated before the first step, so that they are there at the peak of the forward."""
    gathered: int = 2
    """Of a weight that ZeRO 3 has gathered."""

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.master + self.moments


OWN = StateConvention("float32", 4, 4, 0, gathered=4)
MIXED_16 = StateConvention("mixed-16", 2, 2, 4)
LEAN_12 = StateConvention("lean-12", 2, 2, 0)
MEGATRON = StateConvention("megatron-18", 2, 4, 4, has_early_gradients=True)
SHARDED_16 = StateConvention("fsdp-16", 4, 4, 0)
CONVENTIONS = {one.name: one for one in (OWN, MIXED_16, LEAN_12, MEGATRON, SHARDED_16)}

_OF_SOFTWARE = {
    "closeranks": OWN,
    "megatron": MEGATRON,
    "megatron-core": MEGATRON,
    "fsdp": SHARDED_16,
    "composer": SHARDED_16,
}


def convention_of(software: str) -> StateConvention:
    """What a training software keeps; mixed precision with master weights where it is not known."""
    return _OF_SOFTWARE.get(software, MIXED_16)


def find_convention(name: str) -> StateConvention:
    if name not in CONVENTIONS:
        raise ConfigError([Problem("memory", f"there is no convention '{name}'", did_you_mean(name, CONVENTIONS))])
    return CONVENTIONS[name]


def has_fused_kernels(software: str) -> bool:
    """Whether norms and activations are fused without a compiler, and keep their inputs only."""
    return software.startswith("megatron") or software in ("deepspeed", "composer")


def has_fused_loss(software: str) -> bool:
    """Whether the gradient of the logits replaces them in place, and neither is converted to float32."""
    return software in ("closeranks", "composer")

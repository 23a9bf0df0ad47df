"""What does one sample cost in any torch module? The value that tracing gives; ``models.module_trace`` makes it.

Units in execution order, each with its matrix products by shape, its attention, the bytes that its other operations
move and the activations that it keeps for backward. Invariant: everything is for one sample, so that a micro-batch is a
plain multiple; what could not be traced is said in ``untraced`` and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product (m x k) times (k x n). A convolution is listed as the product that it amounts to."""

    m: int
    """Grows with the samples of a micro-batch, unless ``is_batched``."""
    n: int
    k: int
    count: int = 1
    is_batched: bool = False
    """Whether each sample brings products of its own: the count grows with the micro-batch, and no dim does."""
    grows: str = "m"
    """The dim that grows with the micro-batch, where it is not ``is_batched``: ``k`` in a weight's gradient. Empty:
    none; it is computed once for each micro-batch."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    def for_samples(self, num_samples: int) -> Product:
        """The product of a micro-batch."""
        m, k, count = self.m, self.k, self.count
        if self.is_batched:
            count *= num_samples
        elif self.grows == "k":
            k *= num_samples
        elif self.grows == "m":
            m *= num_samples
        return Product(m, self.n, k, count, self.is_batched, self.grows)


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """A part of the model: one of its repeated blocks, or what lies between them."""

    name: str
    """Of a module; empty for what belongs to no unit, such as the loss."""
    num_params: int
    products: tuple[Product, ...] = ()
    """Of forward."""
    backward_products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    """Of forward, in fused attention: every query with every key. Backward has twice as many."""
    moved_bytes: float = 0.0
    """Read and written in forward by operations that are neither products nor attention, one by one: not compiled."""
    backward_moved_bytes: float = 0.0
    fixed_moved_bytes: float = 0.0
    """Forward and backward, for each micro-batch however many samples it has: casts of weights, mostly."""
    saved_activation_bytes: float = 0.0
    """Kept from forward to backward."""
    fixed_saved_bytes: float = 0.0
    """The same for each micro-batch, however many samples it has: copies of weights in half precision."""
    output_bytes: float = 0.0
    """What the unit passes on: all that full recompute keeps of it."""
    is_block: bool = False

    @property
    def forward_flops(self) -> float:
        return sum(product.flops for product in self.products) + self.attention_flops

    @property
    def backward_flops(self) -> float:
        return sum(product.flops for product in self.backward_products) + 2 * self.attention_flops


@dataclass(frozen=True, slots=True)
class ModuleTrace:
    """A module as tracing saw it."""

    units: tuple[TracedUnit, ...]
    untraced: tuple[str, ...] = ()
    """What is missing from the figures, one sentence each; empty: nothing."""
    precision: str = "float32"
    """The job's precision in which activations and moved bytes were counted."""

    @property
    def num_params(self) -> int:
        """A tied parameter belongs to the first unit that has it."""
        return sum(unit.num_params for unit in self.units)

    @property
    def flops_per_sample(self) -> float:
        """Of forward and backward, without recompute."""
        return sum(unit.forward_flops + unit.backward_flops for unit in self.units)

    @property
    def saved_activation_bytes(self) -> float:
        return sum(unit.saved_activation_bytes for unit in self.units)

    @property
    def blocks(self) -> Iterator[TracedUnit]:
        return (unit for unit in self.units if unit.is_block)

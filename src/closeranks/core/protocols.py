"""Which seams do the rooms meet at?

Rooms never import one another; ``run`` introduces them through these protocols. Torch appears in annotations only, so
that planning and the agent start without it. Each protocol is documented as its call sequence with the actor of each
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

Batch = Mapping[str, Any]
"""Named tensors whose first dim is the sample; what a source yields, a model's loss takes."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's loss as a sum, so that micro-batches of any size add up exactly.

    The step divides once by the weight of all ranks. ``metrics`` are sums too (correct answers, say) and are divided by
    the same weight; their names must be those the spec declares, on every rank.
    """

    total: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """How parameters whose name matches ``pattern`` split along the tensor axis."""

    pattern: str
    dim: int | None
    """The tensor dim that is split; None: replicated."""


@runtime_checkable
class ModelSpec(Protocol):
    """Everything a run needs to know of a model besides its weights; one stands beside each model.

    Call sequence: ``run`` calls ``build`` (under the meta device where ``builds_on_meta``), then materialises each
    parameter and calls ``init_parameter`` on it with a generator keyed by the parameter's name, then ``init_buffers``;
    from then on only ``loss``. Planning reads the numbers without building anything.
    """

    name: str
    metrics: tuple[str, ...]
    """Names of the sums that ``loss`` reports beside the loss."""
    builds_on_meta: bool
    """False for a user's module that fills its own weights when built: it is built in place, on every rank alike."""
    item: str
    """What throughput counts: ``token`` or ``sample``."""
    items_per_sample: int
    flops_per_item: float
    """Forward and backward; 0 where it is not known."""
    blocks: tuple[str, ...]
    """Names of the repeated modules in order: units of recompute and sharding, and where stages may be cut."""
    compile_units: tuple[str, ...]
    """Modules that ``torch.compile`` takes one by one: the blocks, and what else pays."""
    sharding_rules: tuple[ShardingRule, ...]

    def build(self) -> nn.Module: ...

    def init_parameter(self, name: str, parameter: Tensor, generator: Any) -> None: ...

    def init_buffers(self, module: nn.Module) -> None: ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss: ...


@runtime_checkable
class Source(Protocol):
    """Samples by index, read a batch at a time; order and sharding are not its business.

    Call sequence: ``data.loader`` asks for ``read(indices)`` from a background thread, one call per micro-batch.
    """

    identity: str
    """Names the data; a resumed run refuses another one."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray[Any, Any]) -> Batch:
        """The samples of these indices as CPU tensors stacked along dim 0."""
        ...


class Reducer(Protocol):
    """How gradients travel.

    Call sequence, once per step on every rank: ``arm`` before the step's last backward (a rank without a micro-batch
    skips it), backward (buckets leave as they fill), ``finish``. Then every ``.grad`` is the sum over ranks.
    """

    def arm(self) -> None: ...

    def finish(self) -> None: ...

    def gradients(self) -> Sequence[Tensor]:
        """The summed gradients as few large tensors, for norms and scaling; valid from ``finish`` to ``release``."""
        ...

    def release(self) -> None:
        """Forget this step's gradients."""
        ...


class Group(Protocol):
    """The few collectives that the step and evaluation need from the data group, whatever backend carries them."""

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; every rank gets the same bits."""
        ...

"""Which seams do the rooms meet at?

Rooms never import one another; ``run`` introduces them through these protocols. Torch appears in annotations only, so
that planning and the agent start without it. Each protocol is documented as its call sequence with the actor of each
call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from closeranks.core.pieces import Piece

if TYPE_CHECKING:
    import numpy as np
    import torch.distributed as dist
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
    """How parameters whose name matches ``pattern`` split along the tensor axis; the first match counts."""

    pattern: str
    dim: int | None
    """The tensor dim that is split; None: replicated."""
    sequence: bool = False
    """Of a replicated one: it works on a share of the sequence, so its gradient is a sum over the tensor ranks."""


@dataclass(frozen=True, slots=True)
class ActivationCollectives:
    """What happens on the tensor axis to activations that enter or leave the modules matching ``pattern``.

    Forward / backward: ``copy`` nothing / all-reduce; ``gather`` all-gather along the sequence / reduce-scatter;
    ``sum`` all-reduce / nothing; ``scatter`` reduce-scatter along the sequence / all-gather; ``whole`` all-gather of
    the last dim / own share. Modules without a crossing, on themselves or around them, get one from their weights'
    rules: a split of outputs copies what enters, a split of inputs sums what leaves.
    """

    pattern: str
    on_input: Literal["", "copy", "gather"] = ""
    on_output: Literal["", "sum", "scatter", "whole"] = ""


class PipelineSpec(Protocol):
    """A model as units in a row: what pipeline stages are cut from.

    Call sequence: every stage calls ``beside``; then the first one ``enter`` and its units, later ones their units on
    what they were sent, the last one ``leave``. Without a pipeline the spec's own ``loss`` does it all, with the same
    result.
    """

    units: tuple[str, ...]
    """Names of modules in the order they run; together they hold every parameter."""
    costs: tuple[float, ...]
    """Work of each unit, in any measure: stages are cut so that their sums come out even."""

    def first_input(self, module: nn.Module, batch: Batch) -> Tensor:
        """What the first unit reads."""
        ...

    def shared_inputs(self, module: nn.Module, batch: Batch) -> Any:
        """What units read besides the hidden states (where documents end, say). Every stage finds it in the batch, once
        for all of its units; None where there is nothing."""
        ...

    def run_unit(self, module: nn.Module, number: int, hidden: Tensor, beside: Any = None) -> Tensor:
        """Run unit ``number``; the random stream is keyed by it. ``module`` may lack units of other stages."""
        ...

    def loss_from_output(self, module: nn.Module, output: Tensor, batch: Batch) -> Loss:
        """The loss of what the last unit gave."""
        ...


SEVERAL_STAGES = -1


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as this rank holds it once the tensor and pipeline axes are applied, before the data axis is."""

    parameter: nn.Parameter
    piece: Piece
    """Its share of the whole parameter, by the parameter's first name."""
    aliases: tuple[str, ...] = ()
    """Further names of a tied one."""
    is_primary: bool = True
    """False where another rank off the data axis holds the same values and speaks for them in sums over the model."""
    stage: int = 0
    """Which of this rank's stages it belongs to; SEVERAL_STAGES of a tied one: its gradient is complete at the end."""
    partial_over: tuple[dist.ProcessGroup, ...] = ()
    """Groups over which its gradient is still a sum to be made, besides the data axis: shares of a sequence, and the
    two ends of a pipeline that share a tied parameter."""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """What this rank's optimizer updates of one parameter: the whole, or its shard."""

    tensor: Tensor
    """Updated in place; its ``.grad`` is set by the reducer's ``finish``."""
    piece: Piece
    is_primary: bool = True
    """Whether this rank speaks for it: each value of the model has one speaker among all ranks."""


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
    """How its parameters split along the tensor axis; empty: they do not."""
    activation_collectives: tuple[ActivationCollectives, ...]
    pipeline_spec: PipelineSpec | None
    """None where no stages can be cut."""

    def build(self) -> nn.Module: ...

    def init_parameter(self, name: str, parameter: Tensor, generator: Any) -> None: ...

    def init_buffers(self, module: nn.Module) -> None: ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss: ...


@runtime_checkable
class DataSource(Protocol):
    """Samples by index, read a batch at a time; order and sharding are not its business.

    Call sequence: ``data.loader`` asks for ``read(indices)`` from a background thread, one call per micro-batch.
    """

    identity: str
    """Names the data; a resumed run refuses another one."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray[Any, Any]) -> Batch:
        """The samples of these indices as CPU tensors stacked along dim 0."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorFeedbackTensor:
    """A tensor that gradients left behind on their way, and that must survive: see ``sync.memory``."""

    kind: str
    piece: Piece
    """Under its key in the state, ``residual/layers.0.weight``; its first dim are rows, of ranks that have one each."""
    tensor: Tensor
    is_saved_here: bool = True
    """False where another rank holds the same and saves it."""


class Reducer(Protocol):
    """How gradients travel over the data axis, and updated weights back.

    Call sequence on every rank, in each step: ``begin_step``; for every micro-batch ``begin_backward``, backward
    (buckets leave as they fill), ``end_backward``; then ``finish`` once. Then the ``.grad`` of every leaf is the sum
    over the data ranks (and over ``Held.partial_over``). The optimizer updates the leaves, ``spread`` brings the new
    values to whoever computes with them, ``settle`` keeps what the step left behind, ``release`` forgets the gradients.
    """

    needs_equal_counts: bool
    """Whether all data ranks must work off the same number of micro-batches, since each of them is a collective."""

    def parameter_shards(self) -> Sequence[ParameterShard]:
        """What this rank updates; the same objects for the whole run."""
        ...

    def begin_step(self, step: int) -> None:
        """Before a step; how gradients travel may depend on its number."""
        ...

    def begin_backward(self, stage: int = 0, *, is_last: bool) -> None:
        """Before a backward that produces gradients of ``stage``; ``is_last``: no other of this step will."""
        ...

    def end_backward(self, stage: int = 0) -> None:
        """After it. What travels in every micro-batch, with parameters this one did not use, leaves now."""
        ...

    def finish(self) -> None: ...

    def gradients(self) -> Sequence[Tensor]:
        """All gradients of the leaves as few large tensors, for scaling; valid from ``finish`` to ``release``."""
        ...

    def primary_gradients(self) -> Sequence[Tensor]:
        """The same, of the leaves this rank speaks for: their squares, added over all ranks, are the model's norm."""
        ...

    def unused_parameters(self) -> Collection[str]:
        """Names of the trained parameters that this rank holds and computed no gradient for in this step; valid from
        ``finish`` to ``release``. Their ``.grad`` may still be a sum of what others computed."""
        ...

    def gather_parameters(self) -> None:
        """Bring updated leaves to the ranks that compute with them."""
        ...

    def commit(self, taken: Tensor) -> None:
        """Keep what was remembered of this step's gradients where ``taken`` is 1, forget it where it is 0."""
        ...

    def release(self) -> None:
        """Forget this step's gradients."""
        ...

    def error_feedback(self) -> Iterable[ErrorFeedbackTensor]:
        """What must survive of it; the same tensors for the whole run."""
        ...

    def compression_errors(self) -> Sequence[Tensor]:
        """What this rank measured in this step of what compression lost, as
        ``sync.ways.FlatReduction.compression_errors`` has it."""
        ...


class ReduceGroup(Protocol):
    """The few collectives that the step and evaluation need from the data group, whatever backend carries them."""

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; every rank gets the same bits."""
        ...

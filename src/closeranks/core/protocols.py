"""The protocols through which the rooms (the packages of closeranks) work together.

Rooms never import one another; ``run`` connects them through these protocols. Torch appears in annotations only, so
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
"""Named tensors whose first dim is the sample; a data source yields them and a model's loss takes them."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's loss as a sum, so that micro-batches of any size add up exactly.

    The step divides once by the weight of all ranks. ``metrics`` are sums too (correct answers, say) and are divided by
    the same weight; their names must be those the spec declares, on every rank.
    """

    total: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    """One value per sample, for metrics of the whole evaluation set (``SampleMetrics``)."""


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """How parameters whose name matches ``pattern`` split along the tensor axis; the first match counts."""

    pattern: str
    dim: int | None
    """The tensor dim that is split; None: replicated."""
    sequence: bool = False
    """For replicated parameters: applied to a shard of the sequence, so the gradient is a sum over the tensor ranks."""


@dataclass(frozen=True, slots=True)
class ActivationCollectives:
    """The collectives on the tensor axis for activations that enter or leave the modules matching ``pattern``.

    Forward / backward: ``copy`` nothing / all-reduce; ``gather`` all-gather along the sequence / reduce-scatter;
    ``sum`` all-reduce / nothing; ``scatter`` reduce-scatter along the sequence / all-gather; ``whole`` all-gather of
    the last dim / own shard. Modules without an entry, on themselves or around them, get one from their weights' rules:
    weights split by outputs copy the input, weights split by inputs sum the output.
    """

    pattern: str
    on_input: Literal["", "copy", "gather"] = ""
    on_output: Literal["", "sum", "scatter", "whole"] = ""


class PipelineSpec(Protocol):
    """A model as a sequence of units, from which pipeline stages are cut.

    Call sequence: every stage calls ``shared_inputs``; then the first stage calls ``first_input`` and runs its units,
    later stages run their units on what they receive, and the last one calls ``loss_from_output``. Without a pipeline
    the spec's own ``loss`` does it all, with the same result.
    """

    units: tuple[str, ...]
    """Names of modules in the order they run; together they hold every parameter."""
    costs: tuple[float, ...]
    """Relative cost of each unit, in any measure: stages are cut so that their sums are balanced."""

    def first_input(self, module: nn.Module, batch: Batch) -> Tensor:
        """The input of the first unit."""
        ...

    def shared_inputs(self, module: nn.Module, batch: Batch) -> Any:
        """What units read besides the hidden states (document boundaries, say). Every stage computes it from the batch,
        once for all of its units; None if there is nothing."""
        ...

    def run_unit(self, module: nn.Module, number: int, hidden: Tensor, shared: Any = None) -> Tensor:
        """Run unit ``number``; the random stream is keyed by it. ``module`` may lack units of other stages."""
        ...

    def loss_from_output(self, module: nn.Module, output: Tensor, batch: Batch) -> Loss:
        """The loss of the last unit's output."""
        ...


SEVERAL_STAGES = -1


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as this rank holds it after the tensor and pipeline axes are applied, before the data axis is."""

    parameter: nn.Parameter
    piece: Piece
    """Its shard of the whole parameter, under the parameter's first name."""
    aliases: tuple[str, ...] = ()
    """Further names of a tied parameter."""
    is_primary: bool = True
    """False if another rank off the data axis holds the same values and counts them in sums over the model."""
    stage: int = 0
    """Which of this rank's stages it belongs to; SEVERAL_STAGES for a tied one: its gradient is complete at the end."""
    partial_over: tuple[dist.ProcessGroup, ...] = ()
    """Groups, besides the data axis, over which its gradient must still be summed: shards of a sequence, and the two
    ends of a pipeline that share a tied parameter."""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of one parameter that this rank's optimizer updates: the whole, or its shard."""

    tensor: Tensor
    """Updated in place; its ``.grad`` is set by the reducer's ``finish``."""
    piece: Piece
    is_primary: bool = True
    """Whether this rank counts it in sums over the model: each value of the model is primary on exactly one rank."""


@runtime_checkable
class ModelSpec(Protocol):
    """Everything a run needs to know about a model besides its weights; each model has one.

    Call sequence: ``run`` calls ``build`` (under the meta device where ``builds_on_meta``), then materialises each
    parameter and calls ``init_parameter`` on it with a generator keyed by the parameter's name, then ``init_buffers``;
    from then on only ``loss``. Planning reads the numbers without building anything.
    """

    name: str
    metrics: tuple[str, ...]
    """Names of the sums that ``loss`` reports in addition to the loss."""
    builds_on_meta: bool
    """False for a user's module that initializes its own weights: it is built in place, identically on every rank."""
    item: str
    """The unit of throughput: ``token`` or ``sample``."""
    items_per_sample: int
    flops_per_item: float
    """Forward and backward; 0 where it is not known."""
    blocks: tuple[str, ...]
    """Names of the repeated modules in order: units of recompute and sharding, and where stages may be cut."""
    compile_units: tuple[str, ...]
    """Modules that ``torch.compile`` compiles one by one: the blocks, and others that benefit."""
    sharding_rules: tuple[ShardingRule, ...]
    """How its parameters split along the tensor axis; empty: they do not."""
    activation_collectives: tuple[ActivationCollectives, ...]
    pipeline_spec: PipelineSpec | None
    """None if the model cannot be cut into stages."""

    def build(self) -> nn.Module: ...

    def init_parameter(self, name: str, parameter: Tensor, generator: Any) -> None: ...

    def init_buffers(self, module: nn.Module) -> None: ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss: ...


@runtime_checkable
class RecomputeFlops(Protocol):
    """A model's spec that knows what activation recompute repeats; the HFU of other models is not known then."""

    def recompute_flops_per_item(self, recompute: str, keep: Collection[str]) -> float: ...


@runtime_checkable
class SampleMetrics(Protocol):
    """A model's spec with metrics that are no sums over batches, such as the AUC.

    Call sequence: in an evaluation every rank keeps ``Loss.samples`` of its micro-batches; then each calls
    ``sample_metrics`` with those of all ranks, in the order of the samples, in float64.
    """

    sample_values: tuple[str, ...]
    """Names in ``Loss.samples``, the same for every batch."""

    def sample_metrics(self, values: Mapping[str, Tensor]) -> dict[str, float]: ...


@runtime_checkable
class RowSource(Protocol):
    """Where the rows of an embedding table are kept: in this process, or on servers.

    Call sequence on a worker (``models.table``): in every micro-batch ``ask`` and then ``pull`` with its distinct ids,
    sorted, and after its backward one ``push`` with the same ids and one gradient for each. Ids are not negative. A row
    that nobody has asked for before is born with ``core.table_rows.initial_rows``. Updates are the source's own affair:
    pushed gradients are sums, which it adds up until it is told that the step is taken.
    """

    dim: int

    def ask(self, ids: Tensor) -> None:
        """A ``pull`` of the same ids follows; sources that share messages send all that was asked for in one."""
        ...

    def pull(self, ids: Tensor) -> Tensor:
        """Rows [ids, dim], as a tensor of the caller's own."""
        ...

    def push(self, ids: Tensor, gradients: Tensor) -> None: ...


class RowRule(Protocol):
    """An update rule of rows (``optim.row_rules``): pure functions, each row by itself."""

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        """State of new rows, with one entry of each tensor per row."""
        ...

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], gradients: Tensor, *, lr: float
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@runtime_checkable
class DataSource(Protocol):
    """Samples by index, read a batch at a time; order and sharding are decided elsewhere.

    Call sequence: ``data.loading.loader`` calls ``read(indices)`` from a background thread, once per micro-batch.
    """

    identity: str
    """Identifies the data; a resumed run refuses other data."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray[Any, Any]) -> Batch:
        """The samples at these indices as CPU tensors stacked along dim 0."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorFeedbackTensor:
    """Error-feedback state of gradient compression, which must be saved: see ``sync.compress.error_feedback``."""

    kind: str
    piece: Piece
    """Named by its key in the state, ``residual/layers.0.weight``; the first dim has one row per rank that has one."""
    tensor: Tensor
    is_saved_here: bool = True
    """False if another rank holds the same tensor and saves it."""


class Reducer(Protocol):
    """Reduces gradients over the data axis and gathers updated weights.

    Call sequence on every rank, in each step: ``begin_step``; for every micro-batch ``begin_backward``, backward
    (buckets are sent as they fill), ``end_backward``; then ``finish`` once. After that the ``.grad`` of every parameter
    shard is the sum over the data ranks (and over ``LocalParameter.partial_over``). The optimizer updates the shards,
    ``gather_parameters`` brings the new values to the ranks that compute with them, ``commit`` keeps or drops the
    step's error feedback, ``release`` frees the gradients.
    """

    needs_equal_counts: bool
    """Whether all data ranks must run the same number of micro-batches, since each of them is a collective."""

    def parameter_shards(self) -> Sequence[ParameterShard]:
        """What this rank updates; the same objects for the whole run."""
        ...

    def begin_step(self, step: int) -> None:
        """Before a step; the reduction may depend on its number."""
        ...

    def begin_backward(self, stage: int = 0, *, is_last: bool) -> None:
        """Before a backward that produces gradients of ``stage``; ``is_last``: no later one of this step does."""
        ...

    def end_backward(self, stage: int = 0) -> None:
        """After it. What is reduced in every micro-batch, including parameters this one did not use, is sent now."""
        ...

    def finish(self) -> None: ...

    def gradients(self) -> Sequence[Tensor]:
        """All gradients of the shards as a few large tensors, for scaling; valid from ``finish`` to ``release``."""
        ...

    def primary_gradients(self) -> Sequence[Tensor]:
        """The same for the primary shards of this rank: their squares, summed over all ranks, give the model's norm."""
        ...

    def unused_parameters(self) -> Collection[str]:
        """Names of the trained parameters that this rank holds and computed no gradient for in this step; valid from
        ``finish`` to ``release``. Their ``.grad`` may still be a sum of what other ranks computed."""
        ...

    def gather_parameters(self) -> None:
        """Bring updated shards to the ranks that compute with them."""
        ...

    def commit(self, taken: Tensor) -> None:
        """Keep this step's error feedback where ``taken`` is 1, drop it where it is 0."""
        ...

    def release(self) -> None:
        """Free this step's gradients."""
        ...

    def error_feedback(self) -> Iterable[ErrorFeedbackTensor]:
        """The error-feedback state to save; the same tensors for the whole run."""
        ...

    def compression_errors(self) -> Sequence[Tensor]:
        """The compression errors that this rank measured in this step, as defined by
        ``sync.collectives.reductions.FlatReduction.compression_errors``."""
        ...


class ReduceGroup(Protocol):
    """The few collectives that the step and evaluation need from the data group, whatever backend carries them."""

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; every rank gets the same bits."""
        ...

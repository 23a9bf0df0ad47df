"""The callbacks of a pipeline for each micro-batch: ``PipelineCallbacks`` as steps and evaluations implement them.

The pipeline executor knows the stages and their order; the callbacks supply the data, the loss, RNG seeds, statistics
and the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from closeranks.core.errors import UserError
from closeranks.core.protocols import Batch, Loss, PipelineSpec, Reducer
from closeranks.data.loading.batch_reader import LoadedBatch
from closeranks.data.sampling.order import MicroBatch
from closeranks.parallel.tensor.tensor_parallel import explain_sharding_errors
from closeranks.run.components.model import Model
from closeranks.run.step.step_timer import StepTimer

BeforeForward = Callable[[MicroBatch, int], None]
ScaleLoss = Callable[[MicroBatch, Loss], Tensor]


def compute_loss(model: Model, batch: Batch) -> Loss:
    """The job's own loss of a batch, for a user's own loop."""
    if model.pipeline is not None:
        what = "session.loss(batch) needs the whole model, but in a pipeline each rank holds only some of its stages"
        raise UserError(what, "Call step.run() to train, session.evaluate() to evaluate, or use pipeline=1.")
    return model.spec.loss(model.module, batch)


def explain_shape_errors(model: Model) -> AbstractContextManager[None]:
    """Wraps the job's own forwards to explain shape errors under tensor parallelism; does nothing without it."""
    if model.layout.tensor == 1:
        return nullcontext()
    return explain_sharding_errors(held.piece for held in model.applied.held)


class MicroBatchCallbacks:
    """The callbacks for a sequence of loaded micro-batches."""

    def __init__(
        self,
        model: Model,
        reducer: Reducer,
        step_timer: StepTimer,
        loaded: Sequence[LoadedBatch],
        before: BeforeForward,
        after: ScaleLoss,
    ) -> None:
        assert model.spec.pipeline_spec is not None
        self._model, self._reducer, self._step_timer = model, reducer, step_timer
        self._pipeline_spec: PipelineSpec = model.spec.pipeline_spec
        self._loaded = loaded
        self._before, self._after = before, after
        self.num_micro = len(loaded)

    def signature(self, micro: int) -> Hashable:
        """Equal for micro-batches of equal shapes, and the same on all stages."""
        leaves = tree_leaves(self._loaded[micro].batch)
        return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))

    def context(self) -> AbstractContextManager[Any]:
        return self._model.precision.context(self._model.device)

    def before_forward(self, stage: int, micro: int) -> None:
        """``stage``: index among this rank's own stages."""
        self._step_timer.micro_batch_done()
        self._before(self._loaded[micro].micro_batch, stage)

    def first_input(self, module: nn.Module, micro: int) -> Tensor:
        return self._pipeline_spec.first_input(module, self._batch(micro))

    def shared_inputs(self, module: nn.Module, micro: int) -> Any:
        return self._pipeline_spec.shared_inputs(module, self._batch(micro))

    def loss_from_output(self, module: nn.Module, micro: int, output: Tensor) -> Tensor:
        loss = self._pipeline_spec.loss_from_output(module, output, self._batch(micro))
        return self._after(self._loaded[micro].micro_batch, loss)

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        self._reducer.begin_backward(stage, is_last=is_last)

    def end_backward(self, stage: int) -> None:
        self._reducer.end_backward(stage)
        self._step_timer.micro_batch_done()

    def _batch(self, micro: int) -> Batch:
        return self._model.precision.cast(self._loaded[micro].batch)

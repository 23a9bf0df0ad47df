"""What does a pipeline do with a micro-batch? The step's and the evaluation's side of ``parallel.pipeline.Work``.

The executor knows stages and order; here stand the data, the loss, random streams, statistics and the reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from closeranks.core.errors import UserError
from closeranks.core.protocols import Batch, Chain, Loss
from closeranks.data.order import MicroBatch
from closeranks.data.reader import Loaded
from closeranks.parallel.tensor import shapes_explained
from closeranks.run.parts import Parts

Open = Callable[[MicroBatch, int], None]
Weigh = Callable[[MicroBatch, Loss], Tensor]


def loss_here(parts: Parts, batch: Batch) -> Loss:
    """The job's own loss of a batch that somebody else's loop holds."""
    if parts.pipeline is not None:
        what = "session.loss(batch) needs the whole model, but in a pipeline each rank holds some stages of it alone"
        raise UserError(what, "Call step.run() to train, session.evaluate() to judge, or use pipeline=1.")
    return parts.spec.loss(parts.module, batch)


def misfits_explained(parts: Parts) -> AbstractContextManager[None]:
    """Around the job's own forwards: nothing at all, unless the tensor axis has split what they compute with."""
    if parts.layout.tensor == 1:
        return nullcontext()
    return shapes_explained(held.piece for held in parts.applied.held)


class PipelineWork:
    """Micro-batches on their way through the stages."""

    def __init__(self, parts: Parts, loaded: Sequence[Loaded], before: Open, after: Weigh) -> None:
        assert parts.spec.chain is not None
        self._parts = parts
        self._chain: Chain = parts.spec.chain
        self._loaded = loaded
        self._before, self._after = before, after
        self.num_micro = len(loaded)

    def signature(self, micro: int) -> Hashable:
        """Equal for micro-batches of equal shapes, on all stages alike."""
        leaves = tree_leaves(self._loaded[micro].batch)
        return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))

    def context(self) -> AbstractContextManager[Any]:
        return self._parts.precision.context(self._parts.device)

    def before_forward(self, stage: int, micro: int) -> None:
        """``stage`` counts this rank's own."""
        self._parts.pace.tick()
        self._before(self._loaded[micro].micro_batch, stage)

    def enter(self, module: nn.Module, micro: int) -> Tensor:
        return self._chain.enter(module, self._batch(micro))

    def beside(self, module: nn.Module, micro: int) -> Any:
        return self._chain.beside(module, self._batch(micro))

    def leave(self, module: nn.Module, micro: int, output: Tensor) -> Tensor:
        loss = self._chain.leave(module, output, self._batch(micro))
        return self._after(self._loaded[micro].micro_batch, loss)

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        self._parts.reducer.begin_backward(stage, is_last=is_last)

    def end_backward(self, stage: int) -> None:
        self._parts.reducer.end_backward(stage)
        self._parts.pace.tick()

    def _batch(self, micro: int) -> Batch:
        return self._parts.precision.cast(self._loaded[micro].batch)

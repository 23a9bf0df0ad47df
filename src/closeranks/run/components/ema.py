"""``optim.ema``, as a component: a moving average of the weights, which is what is evaluated and exported."""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.capture.tensors import StateTensor
from closeranks.core.protocols import Reducer
from closeranks.elastic.vote import Verdict
from closeranks.optim.ema import WeightAverage
from closeranks.run.components.component import Component
from closeranks.run.components.model import Model
from closeranks.run.state.saved_state import EMA, MODEL, SavedState


class Ema(Component):
    def __init__(self, decay: float, model: Model, reducer: Reducer) -> None:
        self._model, self._reducer = model, reducer
        self._average = WeightAverage(reducer.parameter_shards(), decay)

    def after_update(self, index: int, verdict: Verdict) -> None:
        self._average.update(index + 1, verdict.taken)

    def before_evaluation(self) -> None:
        self._average.swap()
        self._reducer.gather_parameters()

    def after_evaluation(self) -> None:
        self._average.swap()
        self._reducer.gather_parameters()

    def tensors(self) -> Iterator[StateTensor]:
        for shard, average in zip(self._reducer.parameter_shards(), self._average.tensors, strict=True):
            yield self._model.shard_state(EMA, shard, shard.piece.name, average)

    def restore(self, saved: SavedState) -> None:
        """If the saved run had no average, start one from its weights."""
        found = saved.shapes(EMA)
        for one in self.tensors():
            source = EMA if one.key in found else MODEL
            saved.read_into(source, one.key, one.piece, one.tensor)

    def weights_loaded(self) -> None:
        self._average.restart()

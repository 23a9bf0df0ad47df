"""The optimizer and the loss scale, as components: their update in a step, and their state between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from closeranks.capture.tensors import StateTensor
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.protocols import Reducer
from closeranks.elastic.vote import Verdict
from closeranks.optim.loss_scale import LossScale
from closeranks.optim.optimizer import Optimizer
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.run.components.component import Component
from closeranks.run.components.model import Model
from closeranks.run.components.unused_parameters import UnusedParameters
from closeranks.run.state.saved_state import OPTIMIZER, OTHER, SavedState

_SCALE = "loss_scale/"


class OptimizerStep(Component):
    """``name``: the algorithm, as in ``optim.name``."""

    def __init__(
        self, optimizer: Optimizer, name: str, model: Model, reducer: Reducer, unused: UnusedParameters
    ) -> None:
        self.optimizer, self._name = optimizer, name
        self._model, self._reducer, self._unused = model, reducer, unused

    def update(self, index: int, verdict: Verdict) -> None:
        absent, gates = self._unused.skipped_updates(verdict)  # parameters that no rank had a gradient for
        gradients = self._reducer.gradients()
        self.optimizer.step(index, gradients, verdict.factor, verdict.taken, unused=absent, gates=gates)

    def figures(self, index: int) -> Mapping[str, Any]:
        return {"lr": self.optimizer.lr(index)}

    def tree(self) -> Mapping[str, Any]:
        return {"algorithm": self._name}

    def tensors(self) -> Iterator[StateTensor]:
        """Named ``parameter/exp_avg``; the same on all ranks that synchronise gradients in every step."""
        for shard, key, tensor in self.optimizer.state_tensors():
            yield self._model.shard_state(OPTIMIZER, shard, f"{shard.piece.name}/{key}", tensor, per_replica=True)

    def check(self, saved: SavedState) -> None:
        algorithm = saved.tree.get("algorithm")
        if algorithm != self._name:
            what = f"the saved optimizer is '{algorithm}', the job's is '{self._name}'"
            raise CheckpointError(what, "Set optim.name back, or start a new run from the weights alone.")
        found = saved.shapes(OPTIMIZER)
        wanted = {one.key for one in self.tensors()}
        trained = {key.rpartition("/")[0] for key in found}
        here = {key.rpartition("/")[0] for key in wanted}
        odd = sorted(here - trained) or sorted(trained - self._model.applied.trainable)
        if odd:
            where = "only the saved optimizer" if odd[0] in trained else "only this model"
            what = f"{where} has the trainable parameter '{odd[0]}'"
            raise CheckpointError(what, "Use the model and the frozen groups of the saved run, or start a new one.")
        if missing := sorted(wanted - found.keys()):
            raise CheckpointError(
                f"the saved optimizer has no {missing[0]}", "Use the optimizer settings of the saved run."
            )

    def restore(self, saved: SavedState) -> None:
        for one in self.tensors():
            saved.read_into(OPTIMIZER, one.key, one.piece, one.tensor)
        self.optimizer.restored()


class LossScaling(Component):
    def __init__(self, loss_scale: LossScale, groups: MeshGroups) -> None:
        self.loss_scale = loss_scale
        self._is_saved_here = groups.replica_group.world.rank == 0

    def update(self, index: int, verdict: Verdict) -> None:
        self.loss_scale.update(verdict.taken)

    def tensors(self) -> Iterator[StateTensor]:
        for key, tensor in self.loss_scale.state().items():
            piece = Piece.whole(f"{_SCALE}{key}", ())
            yield StateTensor(
                OTHER, piece.name, piece, tensor, is_steady=False, is_saved_here=self._is_saved_here, per_replica=True
            )

    def restore(self, saved: SavedState) -> None:
        keys = [key for key in saved.shapes(OTHER) if key.startswith(_SCALE)]
        self.loss_scale.load_state(
            {key.removeprefix(_SCALE): saved.read(OTHER, key, Piece.whole(key, ())) for key in keys}
        )

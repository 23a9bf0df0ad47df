"""The state of a run: everything that a resumed run needs to repeat an uninterrupted one bit for bit.

It consists of the components' state (weights, optimizer, loss scale, data cursor, ...), the run's progress, and the
values that show whether a saved state belongs to this job. Invariants: all randomness is keyed by the seed, so no RNG
state is part of it; nothing is ever gathered, and any layout resumes from any other.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from closeranks import __version__
from closeranks.capture.tensors import StateTensor
from closeranks.core.errors import CheckpointError
from closeranks.data.sampling.job_order import OrderChange, order_change
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Components, Unique
from closeranks.run.components.model import Model
from closeranks.run.components.optimizer import OptimizerStep
from closeranks.run.state.saved_state import ReplicaIndex, ReplicaStateReader, SavedState, as_replica_row

_KEYS = {
    "seed": "run.seed",
    "global_batch": "train.global_batch",
    "precision": "train.precision",
}


class RunState:
    """``identity``: values that must be equal for a resumed run to be the same run. ``replica``: the replica that this
    rank belongs to, if each replica has a state of its own."""

    def __init__(
        self,
        context: RunContext,
        model: Model,
        components: Components,
        identity: Mapping[str, Any],
        replica: ReplicaIndex | None,
    ) -> None:
        self._context, self.model, self._components = context, model, components
        self._identity, self._replica = dict(identity), replica
        self._listed: list[StateTensor] = []
        self._version: list[object] = []

    @property
    def unique(self) -> Unique:
        """How far this rank's state differs from that of the ranks with the same coordinates in other replicas."""
        return max((one.unique for one in self._components), default=Unique.NOTHING)

    def tensors(self) -> list[StateTensor]:
        """All state tensors of this rank; the same list object as long as they are the same tensors in the same
        memory."""
        version = [version_of() for version_of in self._components.phases["version"]]
        if version != self._version or not self._listed:
            self._listed, self._version = self._list(), version
        return self._listed

    def tree(self, step: int) -> dict[str, Any]:
        """The non-tensor state that changes from step to step or shows whether a state belongs to a job."""
        found: dict[str, Any] = {"identity": self._identity, "progress": self._progress(step)}
        for tree in self._components.phases["tree"]:
            found |= tree()
        return found

    def checkpoint_tree(self, step: int) -> dict[str, Any]:
        """The complete non-tensor part of a checkpoint."""
        context = self._context
        return {
            **self.tree(step),
            "schedule": {
                "lr": self._components.get(OptimizerStep).optimizer.lr(step),
                "num_steps": context.schedule.num_steps,
                "micro_batch": context.schedule.micro_batch,
                "ends": [list(end) for end in context.schedule.ends],
            },
            "random": {"seed": context.job.run.seed, "keyed_by": ["seed", "step", "micro_batch"]},
            "config": context.job.model_dump(mode="json"),
            "versions": {"closeranks": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def check(self, saved: SavedState, *, may_be_done: bool = False) -> int:
        """Refuse a state that this job cannot resume from, before any tensor is read; returns the number of finished
        steps.

        An error here means that the job must change; an error later, while tensors are read, means damage.
        ``may_be_done``: also accept a state with nothing left to do.
        """
        tree = saved.tree
        if tree.get("progress") is None or tree.get("identity") is None:
            what = "the checkpoint holds only weights, not the state of a run"
            raise CheckpointError(what, "Name it as checkpoint.weights to start from it.")
        self._refuse_foreign(tree["identity"])
        if tree.get("tables") and not self._context.job.optim.tables.is_on:
            what = "the saved state keeps tables as rows, and this job has them as parameters"
            fix = f'Set optim.tables.rule = "{tree["tables"]["rule"]}", or start a new run.'
            raise CheckpointError(what, fix)
        for check in self._components.phases["check"]:
            check(saved)
        schedule, step, position = (
            self._context.schedule,
            int(tree["progress"]["step"]),
            int(tree["progress"]["position"]),
        )
        if step >= schedule.num_steps:
            if may_be_done:
                return step
            what = f"nothing is left to do: the state is at step {step} of {schedule.num_steps}"
            if self._context.job.train.epochs is None:
                raise CheckpointError(what, f"Set train.steps to more than {step}.")
            epochs = f"{position / schedule.num_samples:g}"
            raise CheckpointError(f"{what}, after {epochs} epochs", f"Set train.epochs to more than {epochs}.")
        if position != schedule.position(step):
            what = f"the saved state is at sample {position}, but step {step} of this run ends at "
            what += f"{schedule.position(step)}: resuming would skip samples or repeat them"
            raise CheckpointError(what, "Resume from another checkpoint of the run.")
        return step

    def restore(self, saved: SavedState) -> None:
        """Restore a saved state that passed ``check``. If this raises, the state is restored only in part."""
        found = ReplicaStateReader(saved, self._context.groups.replica_group.number)
        for restore in self._components.phases["restore"]:
            restore(found)

    def weights_loaded(self) -> None:
        """Called after weights that belong to no saved state were loaded into the model."""
        for loaded in self._components.phases["weights_loaded"]:
            loaded()

    def _list(self) -> list[StateTensor]:
        found: dict[tuple[str, object], StateTensor] = {}
        for tensors in self._components.phases["tensors"]:
            for one in tensors():
                named = as_replica_row(one, self._replica) if self._replica is not None and one.per_replica else one
                # Two stages of a rank may each hold a tied parameter: the same values, saved once.
                known = found.get((named.section, named.piece))
                if known is None or (named.is_saved_here and not known.is_saved_here):
                    found[named.section, named.piece] = named
        return list(found.values())

    def _progress(self, step: int) -> dict[str, int]:
        return {"step": step, "position": self._context.schedule.position(step)}

    def _refuse_foreign(self, saved: Mapping[str, Any]) -> None:
        for key, value in self._identity.items():
            found = saved.get(key, "")
            if found != value:
                if key == "num_samples":
                    what = f"the state was saved with a dataset of {found} samples, and it has {value} now"
                    fix = "Give it the same samples again, or start a new run with this one as checkpoint.weights."
                    raise CheckpointError(what, fix)
                place = _KEYS.get(key, "data")
                plain = OrderChange(place, place, repr(found), repr(value))
                change = order_change(str(found), str(value)) if key == "order" else plain
                values = f": {change.saved}, not {change.here}" if change.saved else ""
                other = "other data" if change.name == "data" else f"another {change.name}"
                what = f"the state was saved with {other}{values}"
                raise CheckpointError(what, f"Set {change.keys} back, or start a new run without checkpoint.resume.")

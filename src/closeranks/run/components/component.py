"""The interface of components: the parts of a run that act in the phases of a step, hold state, or both.

A component overrides the methods it needs and does not depend on the others. The step calls each phase on all of them
in the order of the list in ``run.builder.build``, which is the same on every rank, so a phase may contain collectives.

    begin            the step opens
    loaded           its micro-batches are on the device
    cancels          asked before each micro-batch: is the rest of this rank's share of the step left out?
    before_forward   a micro-batch is about to run through one of this rank's stages
    before_backward  its loss is known (not called with a pipeline, whose schedule runs backward)
    after_backward   its gradients are added up (likewise)
    before_vote      gradients are complete on this rank: add what the ranks must agree on to the ballot
    after_vote       the verdict is known on the device; gradients are intact, the state is still that of the last step
    update           change the state by the verdict, without waiting for the host
    after_update     this rank's parameters are updated, no other rank has them yet
    end              distribute them to the ranks that need them, drop the gradients
    settled          the host has read the verdict; on an accelerator that is one step later
    ended            no step follows

[Note: state of a component] ``tensors`` lists the tensors to save, ``tree`` returns everything else as JSON values, and
``restore`` reads both back from a state that any layout may have written. What is listed is copied into host memory for
recovery and written into checkpoints; a component does nothing else for either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from closeranks.capture.tensors import StateTensor
    from closeranks.core.events import Event
    from closeranks.data.loading.batch_reader import LoadedBatch
    from closeranks.data.sampling.order import MicroBatch
    from closeranks.elastic.vote import Ballot, Verdict
    from closeranks.run.state.saved_state import SavedState
    from closeranks.run.step.step_results import StepResult


class Unique(IntEnum):
    """How far a rank's state differs from that of the ranks with the same coordinates in other replicas."""

    NOTHING = 0
    REPLICA = 1
    """Each replica has some state of its own."""
    RANK = 2
    """Each rank has some state of its own."""


class Component:
    """Subclass it and override what is needed; every method does nothing by default."""

    unique: Unique = Unique.NOTHING

    # Phases of a step. ``index`` is the number of steps finished before it.

    def begin(self, index: int) -> None: ...

    def loaded(self, index: int, batches: Sequence[LoadedBatch]) -> None: ...

    def cancels(self, index: int) -> bool:
        """Whether nobody would count what this rank has not computed yet. Not asked with a pipeline."""
        return False

    def before_forward(self, micro_batch: MicroBatch, stage: int) -> None: ...

    def before_backward(self, micro_batch: MicroBatch) -> None: ...

    def after_backward(self, weight: Tensor, scale: Tensor) -> None:
        """``weight``: what the losses so far are to be divided by; ``scale``: what they were multiplied by."""

    def before_vote(self, index: int, ballot: Ballot) -> None: ...

    def after_vote(self, index: int, verdict: Verdict) -> None: ...

    def update(self, index: int, verdict: Verdict) -> None: ...

    def after_update(self, index: int, verdict: Verdict) -> None: ...

    def end(self, index: int) -> None: ...

    def figures(self, index: int) -> Mapping[str, Any]:
        """What this rank measured of the step, as fields of ``StepDone``."""
        return {}

    def voted_figures(self, extra: Mapping[str, Sequence[float]]) -> Mapping[str, Any]:
        """What the vote says of the step, as fields of ``StepDone``; ``extra``: the sums of ``Ballot.extra``."""
        return {}

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None: ...

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        """The run ends, or this generation of it; ``num_done`` steps are finished."""

    # State, see [Note: state of a component].

    def tensors(self) -> Iterable[StateTensor]:
        return ()

    def version(self) -> object:
        """Equal as long as ``tensors`` would list the same memory; called whenever the state is listed."""
        return None

    def tree(self) -> Mapping[str, Any]:
        return {}

    def check(self, saved: SavedState) -> None:
        """Raise ``CheckpointError`` for a state that this job cannot resume from; reads no tensor."""

    def restore(self, saved: SavedState) -> None: ...

    def weights_loaded(self) -> None:
        """The weights were replaced by those of a file, and the run starts from them."""

    def memory(self) -> Mapping[str, int]:
        """Bytes of host memory that it holds beside its state, by kind."""
        return {}

    # Around an evaluation, which may use other weights than those being trained (an EMA).

    def before_evaluation(self) -> None:
        """Called in reverse order: the state's copies are last in the list, so they are complete before it changes."""

    def after_evaluation(self) -> None: ...

    def started(self) -> Mapping[str, Any]:
        """What to report of it when the run starts, as fields of ``RunStarted``."""
        return {}


_T = TypeVar("_T", bound=Component)
_METHODS = tuple(name for name in vars(Component) if not name.startswith("_") and callable(getattr(Component, name)))


class Components:
    """All components of a run, in their order."""

    def __init__(self, components: Iterable[Component]) -> None:
        self._all = list(components)
        self.phases: dict[str, list[Callable[..., Any]]] = {}
        """By method name: the bound methods of all components that override it."""
        self._index()

    def __iter__(self) -> Iterator[Component]:
        return iter(self._all)

    def add(self, *components: Component) -> None:
        """Append them to the list."""
        self._all += components
        self._index()

    def get(self, kind: type[_T]) -> _T:
        """The component of exactly this class."""
        return next(one for one in self._all if type(one) is kind)

    def _index(self) -> None:
        for name in _METHODS:
            own = (one for one in self._all if getattr(type(one), name) is not getattr(Component, name))
            self.phases[name] = [getattr(one, name) for one in own]

"""Gradient synchronisation, as a component: drives the reducer around the update and saves its error feedback.

The step itself drives the reducer through backward, up to the vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from closeranks.capture.tensors import StateTensor
from closeranks.core.protocols import ErrorFeedbackTensor, Reducer
from closeranks.elastic.vote import Verdict
from closeranks.run.components.component import Component, Unique
from closeranks.run.components.sync.error_feedback import restore_error_feedback
from closeranks.run.state.saved_state import SYNC, SavedState


class GradientSync(Component):
    def __init__(self, reducer: Reducer, *, is_compressed: bool, recompresses_sums: bool, summary: str) -> None:
        """``recompresses_sums``: whether the owner of each sum of gradients compresses it again, [Note: two shots];
        ``summary``: a description of the reduction, empty for the usual one."""
        self.reducer, self._recompresses_sums, self._summary = reducer, recompresses_sums, summary
        self.unique = Unique.RANK if is_compressed else Unique.NOTHING

    def begin(self, index: int) -> None:
        self.reducer.begin_step(index)

    def update(self, index: int, verdict: Verdict) -> None:
        self.reducer.commit(verdict.taken)

    def end(self, index: int) -> None:
        self.reducer.gather_parameters()
        self.reducer.release()

    def tensors(self) -> Iterator[StateTensor]:
        yield from map(error_feedback_state, self.reducer.error_feedback())

    def restore(self, saved: SavedState) -> None:
        restore_error_feedback(
            list(self.reducer.error_feedback()), saved, SYNC, recompresses_sums=self._recompresses_sums
        )

    def started(self) -> Mapping[str, Any]:
        return {"sync": self._summary}


def error_feedback_state(one: ErrorFeedbackTensor) -> StateTensor:
    return StateTensor(SYNC, one.piece.name, one.piece, one.tensor, is_saved_here=one.is_saved_here)

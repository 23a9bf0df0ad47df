"""The batch history of a run: what earlier parts of a resumed run fix for the later ones.

These are the short steps in which they ended, so that a resumed run continues at exactly the next sample, and their
micro-batch size if the job names none, as dropout and batch norm depend on it. Invariant: a function of the saved state
and the global batch alone. Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.data.sampling.cursor import Cursor, ends_at
from closeranks.run.job.job import Job


@dataclass(frozen=True, slots=True)
class BatchHistory:
    ends: tuple[Cursor, ...] = ()
    """Where earlier parts of the run ended inside a step."""
    micro_batch: int = 0
    """Their micro-batch size; 0: there are no earlier parts."""

    def apply_to(self, job: Job) -> Job:
        """The job with the saved micro-batch size, unless it names one itself."""
        if job.train.micro_batch or not self.micro_batch:
            return job
        return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": self.micro_batch})})

    def to_json(self) -> dict[str, Any]:
        return {"ends": [list(end) for end in self.ends], "micro_batch": self.micro_batch}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BatchHistory:
        ends = tuple(Cursor(int(step), int(position)) for step, position in fields["ends"])
        return cls(ends, int(fields["micro_batch"]))


def batch_history_of(tree: Mapping[str, Any], global_batch: int) -> BatchHistory:
    """Read from the tree of a saved state. Empty for a state of no run, or of one with another global batch: such a
    state is refused later, when it is restored."""
    try:
        progress, saved = tree["progress"], tree.get("schedule", {})
        if tree["identity"]["global_batch"] != global_batch:
            return BatchHistory()
        cursor = Cursor(int(progress["step"]), int(progress["position"]))
        ends = ends_at(cursor, global_batch, [Cursor(int(step), int(at)) for step, at in saved.get("ends", ())])
        # States of earlier versions name it only if their job did; otherwise it was an eighth of the batch.
        named = saved.get("micro_batch") or tree["config"]["train"]["micro_batch"]
        micro_batch = int(named) or max(1, global_batch // 8)
    except (KeyError, TypeError, ValueError, AttributeError):
        return BatchHistory()
    return BatchHistory(ends, micro_batch) if 0 < micro_batch <= global_batch else BatchHistory()

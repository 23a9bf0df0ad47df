"""What does an earlier part of a run fix for all that follow?

Its short steps, so that a continued run goes on at the very sample where it ended, and its micro-batch where the job
names none: dropout and batch norm depend on it. Invariant: a function of the saved state and the global batch alone.
Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.data.cursor import Cursor, ends_at
from closeranks.run.job import Job


@dataclass(frozen=True, slots=True)
class Past:
    ends: tuple[Cursor, ...] = ()
    """Where earlier parts of the run ended inside a step."""
    micro_batch: int = 0
    """What they trained with; 0: there were none."""

    def applied_to(self, job: Job) -> Job:
        """The job as it goes on: a micro-batch that it does not name is the saved one."""
        if job.train.micro_batch or not self.micro_batch:
            return job
        return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": self.micro_batch})})

    def to_json(self) -> dict[str, Any]:
        return {"ends": [list(end) for end in self.ends], "micro_batch": self.micro_batch}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Past:
        ends = tuple(Cursor(int(step), int(position)) for step, position in fields["ends"])
        return cls(ends, int(fields["micro_batch"]))


def past_of(tree: Mapping[str, Any], global_batch: int) -> Past:
    """What a saved state says of it. One that is of no run, or of one with another batch, says nothing: it is refused
    when it is restored."""
    try:
        progress, saved = tree["progress"], tree.get("schedule", {})
        if tree["identity"]["global_batch"] != global_batch:
            return Past()
        cursor = Cursor(int(progress["step"]), int(progress["position"]))
        ends = ends_at(cursor, global_batch, [Cursor(int(step), int(at)) for step, at in saved.get("ends", ())])
        # States of earlier versions name it only where their job did; it was an eighth of the batch otherwise.
        named = saved.get("micro_batch") or tree["config"]["train"]["micro_batch"]
        micro_batch = int(named) or max(1, global_batch // 8)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Past()
    return Past(ends, micro_batch) if 0 < micro_batch <= global_batch else Past()

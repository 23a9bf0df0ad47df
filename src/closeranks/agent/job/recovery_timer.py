"""Times one recovery: which rank was lost, and how long each part took until the first finished step.

Invariant: seconds are counted from when the fault was detected to when rank 0 reports a finished step, which all ranks
have voted on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from closeranks.core.events import Event, RankLost, RanksClosed, Restored, RunStarted, StepDone


@dataclass
class RecoveryTimer:
    """One recovery in progress."""

    lost: RankLost
    noticed_at: float
    num_done: int
    """Steps finished before the fault."""
    marks: dict[str, float] = field(default_factory=dict)
    """When each part ended."""
    _first_step: int | None = None
    _layout: str = ""
    _world_size: int = 1

    def mark(self, part: str, now: float) -> None:
        """Call when a part has ended: ``fence``, ``fork``, ``open``, ``restore`` or ``step``."""
        self.marks[part] = now

    def on_event(self, event: Event, generation: int, now: float) -> RanksClosed | None:
        """Takes rank 0's events of the new generation; its first finished step completes the recovery."""
        match event:
            case Restored(step=step, seconds=seconds):
                self._first_step = step
                self.mark("open", now - seconds)
                self.mark("restore", now)
            case RunStarted(first_step=step, layout=layout, world_size=world_size):
                self._layout, self._world_size = layout, world_size
                self._first_step = step if self._first_step is None else self._first_step
            case StepDone(step=step) if self._first_step is None or step > self._first_step:
                self.mark("step", now)
                return self._closed(step, generation, now)
        return None

    def _closed(self, step: int, generation: int, now: float) -> RanksClosed:
        begun = step - 1 if self._first_step is None else self._first_step
        return RanksClosed(
            generation=generation,
            step=step,
            seconds=now - self.noticed_at,
            num_redone=max(0, self.num_done - begun),
            world_size=self._world_size,
            layout=self._layout,
            parts=self._parts(),
        )

    def _parts(self) -> dict[str, float]:
        parts, last = {}, self.noticed_at
        for part, at in sorted(self.marks.items(), key=lambda mark: mark[1]):
            parts[part], last = round(at - last, 4), at
        return parts

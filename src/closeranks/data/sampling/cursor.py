"""The cursor of a run before each step.

A run by epochs may end with a short step. When it is continued, that step stays as short as it was, and the steps after
it are full again, counted from where it ended. Invariant: positions follow each other without a gap or an overlap, so
every sample is still taken once in each epoch, however often a run was continued. Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cursor(NamedTuple):
    """After ``step`` steps, ``position`` samples of the run's order are used up."""

    step: int
    position: int


_BEGIN = Cursor(0, 0)


def position_after(step: int, global_batch: int, ends: Sequence[Cursor] = ()) -> int:
    """Samples used up by ``step`` steps. ``ends``: where earlier parts of the run ended inside a step, in order."""
    last = max((end for end in ends if end.step <= step), default=_BEGIN)
    return last.position + (step - last.step) * global_batch


def steps_to(position: int, global_batch: int, ends: Sequence[Cursor] = ()) -> int:
    """Number of steps that use up ``position`` samples; the last of them is short if they do not divide evenly."""
    last = max((end for end in ends if end.position <= position), default=_BEGIN)
    return last.step - (last.position - position) // global_batch


def ends_at(cursor: Cursor, global_batch: int, ends: Sequence[Cursor] = ()) -> tuple[Cursor, ...]:
    """The ``ends`` of a run that continues from ``cursor``: one more if the cursor is inside a step."""
    before = tuple(end for end in ends if end.step <= cursor.step)
    is_whole = position_after(cursor.step, global_batch, before) == cursor.position
    return before if is_whole else (*before, cursor)

"""Parses a range of steps such as ``10:13``.

Invariant: steps are numbered as ``StepDone`` reports them, from 1; the number after the colon is the first step that is
no longer part of the range, as in a Python slice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from closeranks.core.errors import UserError


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps ``first`` to ``last``, both included."""

    first: int
    last: int

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


NO_STEPS = StepRange(1, 0)


def parse_step_range(text: str) -> StepRange | None:
    """The range a job names, or None for the empty text."""
    if not text.strip():
        return None
    numbers = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if numbers is None:
        raise UserError(f"'{text}' names no steps", 'Write "10:13" to trace steps 10, 11 and 12.')
    first, stop = int(numbers[1]), int(numbers[2])
    if first < 1:
        raise UserError(f"'{text}' starts before the first step", f'Steps count from 1: write "1:{max(stop, 2)}".')
    if stop <= first:
        raise UserError(f"'{text}' holds no step", f'The second number is excluded: write "{first}:{first + 1}".')
    return StepRange(first, stop - 1)

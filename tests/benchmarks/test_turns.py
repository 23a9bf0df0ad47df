from __future__ import annotations

import threading

import pytest
from turns import Turns


class Loop:
    """A loop that owns its thread, as a trainer does."""

    def __init__(self, turns: Turns, fails_at: int | None = None) -> None:
        self._turns, self._fails_at = turns, fails_at
        self.threads: set[int] = set()
        self.num_steps = 0
        self.has_ended = False

    def run(self) -> None:
        self._turns.at_boundary()
        going = True
        while going:
            self.threads.add(threading.get_ident())
            self.num_steps += 1
            if self.num_steps == self._fails_at:
                raise ValueError("step 3 broke")
            going = self._turns.at_boundary()
        self.has_ended = True


def test_a_loop_takes_exactly_the_steps_of_its_turn() -> None:
    turns = Turns()
    loop = Loop(turns)
    turns.start(loop.run)
    assert loop.num_steps == 0
    seen = []
    for allowed in (1, 4, 2):
        turns.take(allowed)
        seen.append(loop.num_steps)
    assert seen == [1, 5, 7]
    assert threading.get_ident() not in loop.threads
    turns.close()
    assert loop.has_ended


def test_what_breaks_the_loop_reaches_the_one_who_waits() -> None:
    turns = Turns()
    turns.start(Loop(turns, fails_at=3).run)
    turns.take(2)
    with pytest.raises(ValueError, match="step 3 broke"):
        turns.take(5)

"""Which processes are a run's leftovers?"""

from __future__ import annotations

from closeranks.agent.leftovers import Process, leftovers

ME, MINE, ZYGOTES = 10, 10, 50


def test_adopted_children_and_their_own_but_nobody_elses() -> None:
    processes = [
        Process(ME, 1, MINE, "S"),
        Process(20, ME, MINE, "S"),  # started by this process itself, as a command of the user's would be
        Process(30, ME, 30, "S"),  # there before the run
        Process(60, ME, 60, "S"),  # a daemon
        Process(61, 60, 60, "R"),
        Process(62, 61, ZYGOTES, "S"),
        Process(63, ME, ZYGOTES, "Z"),  # dead, not reaped
        Process(70, 1, 70, "S"),  # a stranger
    ]
    assert leftovers(processes, ME, MINE, known={30}) == [60, 61, 62]

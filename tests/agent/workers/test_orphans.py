"""Which processes are a run's leftovers?"""

from __future__ import annotations

from closeranks.agent.workers.orphans import ProcessEntry, find_orphans

ME, MINE, ZYGOTES = 10, 10, 50


def test_adopted_children_and_their_own_but_nobody_elses() -> None:
    processes = [
        ProcessEntry(ME, 1, MINE, "S"),
        ProcessEntry(20, ME, MINE, "S"),  # started by this process itself, as a command of the user's would be
        ProcessEntry(30, ME, 30, "S"),  # there before the run
        ProcessEntry(60, ME, 60, "S"),  # a daemon
        ProcessEntry(61, 60, 60, "R"),
        ProcessEntry(62, 61, ZYGOTES, "S"),
        ProcessEntry(63, ME, ZYGOTES, "Z"),  # dead, not reaped
        ProcessEntry(70, 1, 70, "S"),  # a stranger
    ]
    assert find_orphans(processes, ME, MINE, known={30}) == [60, 61, 62]

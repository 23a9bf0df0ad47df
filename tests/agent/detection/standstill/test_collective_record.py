"""What a worker records is what the agent reads, from another mapping of the same memory, whatever the worker does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from closeranks.agent.detection.progress import SharedProgress, WorkerPhase, create_progress_fd
from closeranks.agent.detection.standstill.collective_record import (
    DTYPES,
    NUM_ENTRIES,
    OPS,
    CollectiveRecord,
    CollectiveState,
    GroupLabel,
)

ALL_REDUCE, SEND, FLOAT = OPS.index("all_reduce"), OPS.index("send"), DTYPES.index("float32")


@pytest.fixture
def ends() -> Iterator[tuple[CollectiveRecord, CollectiveRecord]]:
    """The worker's end and the agent's."""
    fd = create_progress_fd()
    both = CollectiveRecord(fd), CollectiveRecord(fd)
    os.close(fd)
    yield both
    for one in both:
        one.close()


def test_a_collective_is_read_with_its_group_and_line(ends: tuple[CollectiveRecord, CollectiveRecord]) -> None:
    worker, agent = ends
    worker.label_group("g", "data", [1, 3, 5, 7])
    place = worker.add_place("key", "train.py", 12, "loss")
    assert worker.known_place("key") == place
    number = worker.issue(ALL_REDUCE, "g", (8, 512), FLOAT, place)
    worker.mark(number, CollectiveState.WAITING)
    worker.issue(SEND, "g", (3,), FLOAT, 0, 2)
    first, second = agent.read()
    assert (first.op, first.tensor, first.group, first.sequence) == ("all_reduce", "float32[8, 512]", "g/1", 1)
    assert (first.place, first.is_waiting, first.peer) == ("train.py:12 in loss", True, None)
    assert (second.op, second.peer, second.sequence, second.is_p2p) == ("send", 5, 0, True), "a global rank"
    assert agent.groups() == (GroupLabel("g/1", "data", (1, 3, 5, 7), 1),)
    worker.mark(number, CollectiveState.DONE)
    assert agent.read()[0].is_done
    assert 0 <= agent.read()[0].age_s < 60


def test_the_newest_are_kept_and_a_late_mark_hits_no_other(ends: tuple[CollectiveRecord, CollectiveRecord]) -> None:
    worker, agent = ends
    worker.label_group("g", "", [0, 1])
    early = worker.issue(ALL_REDUCE, "g", (1,), FLOAT, 0)
    for _ in range(NUM_ENTRIES):
        worker.issue(ALL_REDUCE, "g", (2,), FLOAT, 0)
    worker.mark(early, CollectiveState.WAITING)
    rows = agent.read()
    assert [one.sequence for one in rows] == list(range(2, NUM_ENTRIES + 2))
    assert {one.state for one in rows} == {CollectiveState.ISSUED}
    assert [one.sequence for one in agent.read(3)] == [NUM_ENTRIES - 1, NUM_ENTRIES, NUM_ENTRIES + 1]
    assert agent.groups()[0].sequence == NUM_ENTRIES + 1


def test_full_tables_and_strange_values_do_no_harm(ends: tuple[CollectiveRecord, CollectiveRecord]) -> None:
    worker, agent = ends
    for index in range(200):
        worker.label_group(f"group {index}", "", [0, 1])
    for index in range(1000):
        worker.add_place(index, "x" * 500, index, "f")
    worker.issue(ALL_REDUCE, "group 199", (1, 2, 3, 4, 5, 6, 7), FLOAT, worker.add_place("new", "a.py", 1, "f"))
    (row,) = agent.read()
    assert (row.group, row.place, row.shape) == ("", "", (1, 2, 3, 4, 5))
    worker.label_group("group 3", "tensor", range(0, 4096, 8))
    assert agent.groups()[3].ranks == tuple(range(0, 4096, 8))
    worker.label_group("group 4", "", [n * n for n in range(400)])
    assert agent.groups()[4].ranks == (), "they do not fit"


def test_it_outlives_a_worker_that_is_killed_beside_its_progress() -> None:
    fd = create_progress_fd()
    code = (
        "import os, sys; from closeranks.agent.detection.standstill.collective_record import CollectiveRecord;"
        "from closeranks.agent.detection.progress import SharedProgress;"
        "fd = int(sys.argv[1]); SharedProgress(fd).write(41, 5); record = CollectiveRecord(fd);"
        "record.label_group('g', 'data', [0, 1]); record.mark(record.issue(1, 'g', (7,), 1, 0), 2);"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=False)
    record, progress = CollectiveRecord(fd), SharedProgress(fd)
    os.close(fd)
    (row,) = record.read()
    assert (row.op, row.shape, row.is_waiting) == ("all_reduce", (7,), True)
    assert (progress.read().step, progress.read().phase) == (41, WorkerPhase.REDUCE)
    record.close()
    progress.close()

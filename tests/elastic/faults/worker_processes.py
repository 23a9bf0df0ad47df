"""Workers that are real processes below this one, as an agent's are, and what an agent would show of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pytest

from closeranks.elastic.faults.cgroups import CgroupControl, CgroupUnavailable, find_cgroup_parent
from closeranks.elastic.faults.disk import mount_problem
from closeranks.elastic.faults.processes import TargetProcess

SCRIPT = """
import json, os, signal, socket, sys, time
count, body, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
pairs = [socket.create_server(("127.0.0.1", 0))]
def spin(rank):
    path = os.path.join(place, f"count-{rank}")
    number = 0
    while True:
        number += 1
        if number % 20000 == 0:
            with open(path, "w") as file:
                file.write(str(time.process_time()))
def grow(rank):
    held = []
    while True:
        held.append(bytearray(1 << 16))
        time.sleep(0.0005)
def wait(rank):
    while True:
        signal.pause()
def talk(rank):
    mine = socket.create_connection(pairs[0].getsockname())
    theirs, _ = pairs[0].accept()
    with open(os.path.join(place, f"up-{rank}"), "w"):
        pass
    try:
        got = theirs.recv(1)
        what = "end" if not got else "byte"
    except OSError as error:
        what = type(error).__name__
    try:
        mine.send(b"x"); mine.send(b"x")
        what += " sent"
    except OSError as error:
        what += " " + type(error).__name__
    with open(os.path.join(place, f"raised-{rank}"), "w") as file:
        file.write(what)
    pairs[0].getsockname()
    signal.pause()
pids = []
for rank in range(count):
    pid = os.fork()
    if pid == 0:
        globals()[body](rank)
        os._exit(0)
    pids.append(pid)
print(json.dumps(pids), flush=True)
for _ in pids:
    pid, status = os.wait()
    print(json.dumps([pids.index(pid), os.waitstatus_to_exitcode(status)]), flush=True)
time.sleep(60)
"""


class Phase(IntEnum):
    START = 0
    COMPUTE = 2
    END = 8


@dataclass
class FakeProgress:
    step: int | None = 1
    phase: Phase = Phase.COMPUTE


@dataclass
class FakeWorker:
    rank: int
    pid: int | None = None
    local_rank: int = 0
    progress: FakeProgress = field(default_factory=FakeProgress)


@dataclass
class FakeView:
    """What the agent shows, changed by the test instead of by a run."""

    local_workers: list[FakeWorker]
    now: float = 0.0
    state: str = "running"
    generation: int = 0
    snapshot_paths: Sequence[Sequence[str]] = ()
    zygote: int | None = None

    def at(self, step: int) -> FakeView:
        for one in self.local_workers:
            one.progress.step = step
        self.now += 1.0
        return self


@dataclass
class WorkerTree:
    process: subprocess.Popen[str]
    pids: list[int]
    place: Path

    def view(self) -> FakeView:
        seen = [FakeWorker(rank, pid, rank) for rank, pid in enumerate(self.pids)]
        return FakeView(seen, now=time.monotonic(), zygote=self.process.pid)

    def next_end(self) -> tuple[int, int]:
        """Rank and exit status of the next worker that ends."""
        assert self.process.stdout is not None
        rank, status = json.loads(self.process.stdout.readline())
        return rank, status

    def state(self, rank: int) -> str:
        return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]

    def wchan(self, rank: int) -> str:
        return Path(f"/proc/{self.pids[rank]}/wchan").read_text()

    def cpu_s(self, rank: int) -> float:
        """Processor time it has taken, from the kernel."""
        fields = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def worker_tree(count: int, body: str, place: Path) -> Iterator[WorkerTree]:
    """A process that forks workers, which do ``body``: spin, grow, wait or talk."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", SCRIPT, str(count), body, str(place)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield WorkerTree(process, json.loads(process.stdout.readline()), place)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    with TargetProcess(pid) as one:
        return not one.is_dead


def has(need: CgroupControl) -> pytest.MarkDecorator:
    """Skips where this machine has no such control, and says why."""
    reason = ""
    try:
        find_cgroup_parent(need)
    except CgroupUnavailable as lack:
        reason = str(lack)
    return pytest.mark.skipif(bool(reason), reason=reason)


can_mount = pytest.mark.skipif(bool(mount_problem()), reason=mount_problem() or "root")


def groups_left() -> list[Path]:
    """Control groups of this process's that still stand anywhere."""
    return list(Path("/sys/fs/cgroup").glob(f"**/closeranks-{os.getpid()}-*"))

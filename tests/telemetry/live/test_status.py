"""A status is written whole, and believed only as far as its writer can be found: with real files and processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.telemetry.live.status import (
    UNWATCHED,
    HostStatus,
    RunStatus,
    StatusEvent,
    StatusFreshness,
    StatusProcess,
    StatusWriter,
    WorkerStatus,
    decode_status,
    is_alive,
    read_status,
    resident_bytes,
    status_freshness,
    this_process,
)
from closeranks.telemetry.live.status_text import one_line, status_text

NOW = 1_700_000_000.0
RUNNING = RunStatus(
    run="runs/demo",
    state="running",
    writer=StatusProcess(4242, 1, "box", "boot"),
    began_at=NOW - 34,
    at=NOW - 0.2,
    generation=1,
    world_size=2,
    step=212,
    num_steps=400,
    workers=(
        WorkerStatus(0, "box", 4250, 213, "computing gradients", 0.041, 350 << 20),
        WorkerStatus(1, "box", None, None, "starting"),
    ),
    happened=(StatusEvent(NOW - 5, "rank 1 lost at step 200 (killed by SIGKILL); closed ranks in 0.9 s"),),
    snapshot_every=1,
    snapshot_bytes=57 << 20,
)
WRITES = """
import sys, time
from pathlib import Path
from closeranks.telemetry.live.status import RunStatus, StatusWriter, this_process
writer = StatusWriter(Path(sys.argv[1]))
writer.write(RunStatus(run="r", state="running", writer=this_process(), at=time.time(), step=7))
print("written", flush=True)
sys.stdin.readline()
"""


@contextmanager
def agent(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written its status and lives on."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(folder: Path, later_s: float = 0.0) -> StatusFreshness:
    status = read_status(folder)
    assert status is not None
    return status_freshness(status, time.time() + later_s, is_alive(status.writer))


def test_an_agent_that_lives_is_heard_and_one_that_was_killed_is_gone(tmp_path: Path) -> None:
    with agent(tmp_path) as process:
        assert heard(tmp_path) is StatusFreshness.NOW
        assert heard(tmp_path, later_s=60.0) is StatusFreshness.SILENT
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert heard(tmp_path) is StatusFreshness.GONE, "what is left of it before its parent looks is nobody"
        process.wait()
        assert heard(tmp_path) is StatusFreshness.GONE


def test_another_process_with_its_number_is_not_the_agent(tmp_path: Path) -> None:
    own = this_process()
    assert is_alive(own) is True
    assert is_alive(replace(own, born=own.born - 1)) is False
    assert is_alive(replace(own, boot="another")) is False, "the machine was started anew"
    assert is_alive(replace(own, host="elsewhere")) is None


@pytest.mark.parametrize(
    ("status", "alive", "heard"),
    [
        (RUNNING, True, StatusFreshness.NOW),
        (RUNNING, None, StatusFreshness.NOW),
        (RUNNING, False, StatusFreshness.GONE),
        (replace(RUNNING, at=NOW - 3600), True, StatusFreshness.SILENT),
        (replace(RUNNING, at=NOW - 3600), None, StatusFreshness.FAR),
        (replace(RUNNING, state="finished", at=NOW - 3600), False, StatusFreshness.ENDED),
        (replace(RUNNING, state="failed"), None, StatusFreshness.ENDED),
        (replace(RUNNING, state=UNWATCHED), None, StatusFreshness.UNWATCHED),
    ],
)
def test_how_far_a_status_is_believed(status: RunStatus, alive: bool | None, heard: StatusFreshness) -> None:
    assert status_freshness(status, NOW, alive) is heard


def test_a_status_comes_back_as_it_was(tmp_path: Path) -> None:
    status = replace(RUNNING, hosts=(HostStatus("box", 2, "member"), HostStatus("b", 2, "lost")))
    StatusWriter(tmp_path).write(status)
    assert read_status(tmp_path) == status
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_newer_versions_status_can_be_read(tmp_path: Path) -> None:
    status = decode_status(
        {"state": "running", "mood": "calm", "workers": [{"rank": 3, "hat": "red"}], "writer": {"x": 1}}
    )
    assert status.workers == (WorkerStatus(3),)
    assert status.writer == StatusProcess()
    for text in ("", "{", "[]", '{"workers": 3}'):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) is None
    assert read_status(tmp_path / "nowhere") is None


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_it_is_written_twice_a_second_and_at_once_when_the_generation_or_the_state_is_another(tmp_path: Path) -> None:
    clock = Clock()
    writer = StatusWriter(tmp_path, clock=clock)
    assert writer.is_due(0, "running")
    writer.write(replace(RUNNING, generation=0))
    clock.now_s = 0.4
    assert not writer.is_due(0, "running")
    assert writer.is_due(1, "running")
    assert writer.is_due(0, "closing ranks")
    assert writer.next_at == 0.5
    clock.now_s = 0.5
    assert writer.is_due(0, "running")


def test_a_reader_never_meets_half_a_status(tmp_path: Path) -> None:
    """One process writes as fast as it can, this one reads as fast as it can."""
    program = (
        "import sys; from pathlib import Path\n"
        "from closeranks.telemetry.live.status import RunStatus, StatusEvent, StatusWriter\n"
        "writer = StatusWriter(Path(sys.argv[1]))\n"
        "for step in range(1000):\n"
        "    writer.write(RunStatus(step=step, happened=(StatusEvent(0.0, 'x' * (step % 97) * 100),)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
        while not (tmp_path / "status.json").exists():
            assert process.poll() is None
        seen = []
        while process.poll() is None:
            seen.append(json.loads((tmp_path / "status.json").read_text())["step"])
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


def test_a_full_disk_is_a_sentence_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / ".status.json").symlink_to("/dev/full")
    writer = StatusWriter(tmp_path, on_problem=told.append)
    writer.write(RUNNING)
    writer.write(RUNNING)
    assert len(told) == 1
    assert "No space left on device" in told[0]
    (tmp_path / ".status.json").unlink()
    writer.write(RUNNING)
    assert read_status(tmp_path) == RUNNING


def test_memory_is_what_the_kernel_says() -> None:
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(2**22 + 1) == 0
    assert resident_bytes(None) == 0


def test_the_text_says_who_is_here(tmp_path: Path) -> None:
    lines = status_text(RUNNING, StatusFreshness.NOW, NOW).splitlines()
    assert lines[:5] == [
        "runs/demo: running, step 212 of 400, generation 1",
        "agent 4242 on box, for 34 s, 2 workers, state kept in memory every step (57.0 MiB on this host)",
        "",
        "rank  host  process  step  doing                own time  memory",
        "0     box   4250     213   computing gradients  41 ms     350 MiB",
    ]
    assert lines[5].split() == ["1", "box", "-", "-", "starting", "-", "-"]
    assert lines[-1].endswith("  rank 1 lost at step 200 (killed by SIGKILL); closed ranks in 0.9 s")
    assert "state      " not in "".join(lines), "one host needs no table of hosts"


def test_several_hosts_are_listed() -> None:
    several = replace(RUNNING, hosts=(HostStatus("box", 2, "member"), HostStatus("b", 2, "lost")))
    assert "b     2        lost" in status_text(several, StatusFreshness.NOW, NOW).splitlines()


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        (
            StatusFreshness.GONE,
            "last heard 3 h 0 min ago (step 212 of 400, generation 1): its agent, process 4242 on box, is gone",
        ),
        (
            StatusFreshness.FAR,
            "last heard 3 h 0 min ago (step 212 of 400, generation 1): its agent, process 4242 on box, cannot be",
        ),
        (StatusFreshness.SILENT, "is alive but does not update the status"),
        (StatusFreshness.UNWATCHED, "no agent watches it"),
        (StatusFreshness.ENDED, "running 3 h 0 min ago, step 212 of 400"),
    ],
)
def test_what_is_old_is_told_with_its_age(heard: StatusFreshness, words: str) -> None:
    old = replace(RUNNING, at=NOW - 3 * 3600)
    text = status_text(old, heard, NOW)
    assert words in text.splitlines()[0]
    assert words in one_line(old, heard, NOW)
    assert ("computing gradients" in text) == (heard is StatusFreshness.SILENT), (
        "who is gone is not shown as being at work"
    )

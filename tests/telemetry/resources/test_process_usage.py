"""A process's own use, with its children's: processor time, disks, and what the page cache gave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.telemetry.resources.process_usage import child_pids, read_process
from tests.telemetry.resources.own_process import SPIN, read_twice

NUM_BYTES = 8 << 20


def test_the_keys_are_those_that_the_page_lists() -> None:
    reading = read_process()
    assert {"preemptions", "major_faults", "read_bytes", "write_bytes", "read_call_bytes"} == set(reading.totals)
    assert {"cpus", "run_wait_share"} <= set(reading.rates) <= {"cpus", "run_wait_share", "io_wait_share"}
    assert set(reading.levels) == {"rss_bytes", "swapped_bytes"}
    assert reading.levels["rss_bytes"] > 1 << 20


@pytest.mark.world
def test_work_and_the_work_of_a_child_count_alike() -> None:
    own = read_twice(SPIN.format(seconds=0.5))
    spin = SPIN.format(seconds=0.5)
    child = read_twice(f"import subprocess; subprocess.run([sys.executable, '-c', {spin!r}], check=True)")
    idle = read_twice("time.sleep(0.1)")
    for found in (own, child):
        assert found["process"]["cpus"] * found["seconds"] == pytest.approx(0.5, abs=0.25)
    assert idle["process"]["cpus"] * idle["seconds"] < 0.1


@pytest.mark.world
def test_a_child_that_still_runs_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in child_pids()
        child.communicate(b"\n")
    assert child.pid not in child_pids()


@pytest.mark.world
def test_a_file_comes_from_the_disk_once_and_then_from_the_page_cache(tmp_path: Path) -> None:
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip() in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder is in memory")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(NUM_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = f"open({str(path)!r}, 'rb').read()"
    first, second = read_twice(read)["process"], read_twice(read)["process"]
    assert min(first["read_call_bytes"], second["read_call_bytes"]) >= NUM_BYTES
    assert first["read_bytes"] >= NUM_BYTES
    assert second["read_bytes"] < NUM_BYTES / 8

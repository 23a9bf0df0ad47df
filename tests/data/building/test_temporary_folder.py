"""What a build keeps while it runs goes with it, or with the next one where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from closeranks.data.building.temporary_folder import temporary_folder

HOLD = """
from closeranks.data.building.temporary_folder import temporary_folder
import time
with temporary_folder() as folder:
    (folder / "index").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_its_block(temporary: Path) -> None:
    with temporary_folder() as one, temporary_folder() as other:
        (one / "index").write_text("x")
        assert {one, other} == set(temporary.iterdir())
    assert list(temporary.iterdir()) == []


def test_what_a_killed_build_left_goes_and_what_is_in_use_stays(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", HOLD]
    holders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        killed, alive = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert (killed / "index").exists()
        (temporary / "closeranks-build-file").write_text("no folder")
        with temporary_folder() as mine:
            assert {entry for entry in temporary.iterdir() if entry.is_dir()} == {alive, mine}
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()

"""What memory held when a job ended is written where there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.agent.host.rescue import rescue_snapshots
from closeranks.agent.host.snapshot_memory import SnapshotMemory
from closeranks.core.system import fallback_folders


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with SnapshotMemory() as held:
        held.grow(1)
        Path(held.paths[0][1]).write_bytes(b"a copy")
        yield held


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only other place."""
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(fallback_folders, "fallback_roots", lambda: ("/nowhere", str(tmp_path / "spare")))
    return tmp_path / "spare"


def in_the_way(folder: Path) -> Path:
    """A run's folder that nothing can be written to."""
    folder.write_text("a file")
    return folder


def test_in_the_runs_own_folder(tmp_path: Path, memory: SnapshotMemory, spare: Path) -> None:
    told = rescue_snapshots(memory, tmp_path / "run", "h1")
    assert (tmp_path / "run" / "rescued" / "h1" / "box-00000-1").read_bytes() == b"a copy"
    assert f"Resume via checkpoint.resume={tmp_path / 'run'}." in told
    assert list(spare.iterdir()) == []


def test_elsewhere_where_that_cannot_be_written(tmp_path: Path, memory: SnapshotMemory, spare: Path) -> None:
    told = rescue_snapshots(memory, in_the_way(tmp_path / "run"), "h1", is_part=True)
    (place,) = spare.iterdir()
    assert place.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (place / "rescued" / "h1").iterdir()] == ["box-00000-1"]
    assert told.startswith(
        f"{tmp_path / 'run'} cannot be written (Not a directory): the state in memory was written to"
    )
    assert f"checkpoint.resume={place}." in told
    assert f"belongs beside it, in {place / 'rescued'}" in told


def test_nowhere(tmp_path: Path, memory: SnapshotMemory, spare: Path) -> None:
    os.rmdir(spare)
    assert rescue_snapshots(memory, in_the_way(tmp_path / "run"), "h1").startswith("The state in memory is lost")


def test_what_takes_too_long_is_given_up(tmp_path: Path, memory: SnapshotMemory, spare: Path) -> None:
    assert "it would take too long" in rescue_snapshots(memory, tmp_path / "run", "h1", timeout_s=-1.0)
    assert list(spare.iterdir()) == list((tmp_path / "run" / "rescued").iterdir()) == []


def test_nothing_was_held(tmp_path: Path, spare: Path) -> None:
    with SnapshotMemory() as empty:
        empty.grow(1)
        assert rescue_snapshots(empty, tmp_path / "run", "h1") == ""

"""A folder appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.core.errors import CheckpointError, SetupError
from closeranks.run.huggingface.atomic_folder import atomic_folder


def test_it_is_there_when_it_is_filled_and_not_before(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "down" / "out"
    with atomic_folder(place) as folder:
        (folder / "a").write_text("x")
        assert not place.exists()
    assert (place / "a").read_text() == "x"
    assert [path.name for path in place.parent.iterdir()] == ["out"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


def fill(place: Path, during: Callable[[Path], object]) -> None:
    with atomic_folder(place) as folder:
        (folder / "a").touch()
        during(folder)


def interrupt(folder: Path) -> None:
    raise KeyboardInterrupt


def find_damage(folder: Path) -> None:
    raise CheckpointError("damaged")


@pytest.mark.parametrize("during", [interrupt, find_damage])
def test_whatever_ends_it_early_leaves_nothing(tmp_path: Path, during: Callable[[Path], object]) -> None:
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        fill(tmp_path / "out", during)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="out cannot be written: No space left on device"):
        fill(tmp_path / "out", lambda folder: Path("/dev/full").write_bytes(b"x"))
    assert not list(tmp_path.iterdir())


def test_a_place_that_somebody_took_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be written"):
        fill(tmp_path / "out", lambda folder: (tmp_path / "out" / "theirs").mkdir(parents=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "theirs").exists()

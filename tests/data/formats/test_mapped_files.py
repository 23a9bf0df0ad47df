"""Mapped files are bounded in number and let go in time."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.data.formats.mapped_files import MappedFiles
from tests.data.formats.local_files import FolderFiles


@pytest.fixture
def files(tmp_path: Path) -> FolderFiles:
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode() * 10)
    (tmp_path / "empty").write_bytes(b"")
    return FolderFiles(tmp_path)


def test_the_least_used_is_let_go(files: FolderFiles) -> None:
    maps = MappedFiles(files, 2)
    first = maps.view("a")
    maps.view("b")
    assert maps.view("a") is first
    maps.view("c")
    assert files.num_held == 2
    assert maps.view("a") is first, "b was used longest ago"
    assert bytes(maps.view("b")) == b"b" * 10
    maps.close()
    assert files.num_held == 0


def test_a_view_outlives_its_file(files: FolderFiles) -> None:
    maps = MappedFiles(files, 1)
    view = maps.view("a")
    maps.view("b")
    (files.root / "a").unlink()
    assert bytes(view) == b"a" * 10
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_empty_and_missing_files(files: FolderFiles) -> None:
    maps = MappedFiles(files)
    assert maps.view("empty").shape == (0,)
    with pytest.raises(DataError, match="missing"):
        maps.view("nothing")
    assert files.num_held == 1


def test_pickled_maps_open_again(files: FolderFiles) -> None:
    maps = MappedFiles(files, 3)
    maps.view("a")
    again = pickle.loads(pickle.dumps(maps))
    np.testing.assert_array_equal(again.view("a"), maps.view("a"))

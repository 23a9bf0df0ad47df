from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from closeranks.core.errors import DataError
from closeranks.data.files.open import open_files
from tests.data.files.conftest import as_nobody


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/deep/er.txt", ".hidden", ".index/x", "a/.y"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(name.encode())
    return tmp_path / "set"


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/"])
def test_a_folder_is_listed_and_its_files_are_held_where_they_lie(folder: Path, form: str) -> None:
    files = open_files(form.format(folder))
    assert files.is_local
    assert files.url == str(folder)
    assert [(info.name, info.num_bytes) for info in files.list()] == [("a/deep/er.txt", 13), ("b.txt", 5)]
    files.prefetch(["b.txt"])
    with files.local_path("a/deep/er.txt") as path:
        assert path == folder / "a/deep/er.txt"
    assert files.read("b.txt") == b"b.txt"
    assert files.read(".index/x") == b".index/x"
    assert files.full_name("b.txt") == str(folder / "b.txt")
    copy = pickle.loads(pickle.dumps(files))
    assert copy.list() == files.list()
    files.close()


def test_a_file_is_a_folder_of_one(folder: Path) -> None:
    files = open_files(str(folder / "b.txt"))
    assert [info.name for info in files.list()] == ["b.txt"]
    with files.local_path("b.txt") as path:
        assert path == folder / "b.txt"
    assert files.read("b.txt") == b"b.txt"
    assert files.full_name("b.txt") == files.url == str(folder / "b.txt")


@pytest.mark.parametrize("change", ["cut", "replaced", "written"])
def test_a_file_that_changed_is_not_handed_out(folder: Path, change: str) -> None:
    files = open_files(str(folder))
    files.list()
    path = folder / "b.txt"
    if change == "cut":
        os.truncate(path, 2)
    elif change == "replaced":
        (folder / "new").write_bytes(b"B.TXT")
        os.utime(folder / "new", ns=(1, 1))
        os.rename(folder / "new", path)
    else:
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with (
        pytest.raises(DataError, match=r"b\.txt is not the file that was listed.*Put the old file back"),
        files.local_path("b.txt"),
    ):
        pytest.fail("held")
    with files.local_path("a/deep/er.txt"):
        pass


def test_what_is_not_there_is_a_sentence(folder: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder /no/such"):
        open_files("/no/such").list()
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"there are no files in \S+/empty"):
        open_files(str(folder / "empty")).list()
    files = open_files(str(folder))
    for act in (lambda: files.local_path("gone").__enter__(), lambda: files.read("gone")):
        with pytest.raises(DataError, match=r"set/gone failed: there is no such file"):
            act()
    for act in (lambda: files.local_path("../out").__enter__(), lambda: files.read("/etc/passwd")):
        with pytest.raises(DataError, match="not a name inside"):
            act()


def test_what_may_not_be_read_is_a_sentence(folder: Path) -> None:
    """As a user that is not root, whom nothing is forbidden."""
    with as_nobody():
        with pytest.raises(DataError, match=f"{folder} failed: permission denied"):
            open_files(str(folder)).list()
        with pytest.raises(DataError, match="permission denied"), open_files(str(folder)).local_path("b.txt"):
            pytest.fail("held")

"""Folders are classes, in the order of their names."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records.images import ImageRecords


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"bytes of {name}".encode())
    return root


def opened(root: Path) -> ImageRecords:
    return ImageRecords(open_files(str(root)), IndexLocation())


def test_class_folders_are_numbered_by_name(tmp_path: Path) -> None:
    root = write(
        tmp_path, "dog/1.jpg", "cat/2.PNG", "cat/deeper/1.jpeg", "äffchen/x.webp", "dog/notes.txt", "README.md"
    )
    records = opened(root)
    assert len(records) == 4
    assert records.read(np.array([2, 0])) == [
        {"image": b"bytes of dog/1.jpg", "label": 1, "class": "dog"},
        {"image": b"bytes of cat/2.PNG", "label": 0, "class": "cat"},
    ]
    assert [row["label"] for row in records.read(np.arange(4))] == [0, 0, 1, 2]
    assert records.files_of(np.array([2, 1, 2])) == ["dog/1.jpg", "cat/deeper/1.jpeg"]
    assert str(records.where(2)) == f"'{root / 'dog/1.jpg'}', byte 0"


def test_the_labels_are_those_of_image_folder(tmp_path: Path) -> None:
    """Sorted as Python sorts strings: capitals first, 10 before 9."""
    records = opened(write(tmp_path, "b/1.png", "B/1.png", "9/1.png", "10/1.png"))
    found = {row["class"]: row["label"] for row in records.read(np.arange(4))}
    assert found == {"10": 0, "9": 1, "B": 2, "b": 3}


def test_flat_images_have_no_label(tmp_path: Path) -> None:
    assert opened(write(tmp_path, "b.jpg", "a.jpg")).read(np.array([0])) == [{"image": b"bytes of a.jpg"}]


def test_images_beside_class_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 images of its own beside 2 folders"):
        opened(write(tmp_path, "a/1.jpg", "b/1.jpg", "c.jpg"))


def test_parts_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folders train, val, which are splits.*Name one of them"):
        opened(write(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"))


def test_no_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no images"):
        opened(write(tmp_path, "x.txt"))


@pytest.mark.parametrize("number", [-1, 1])
def test_numbers_outside_are_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(DataError, match=f"no number {number}"):
        opened(write(tmp_path, "a.jpg")).read(np.array([number]))


def test_a_vanished_image_is_no_bad_record(tmp_path: Path) -> None:
    records = opened(write(tmp_path, "a.jpg", "b.jpg"))
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"a\.jpg") as caught:
        records.read(np.array([0]))
    assert type(caught.value) is DataError


def test_the_identity_follows_names_and_sizes(tmp_path: Path) -> None:
    first = opened(write(tmp_path / "1", "a/1.jpg", "b/1.jpg")).identity
    assert first == opened(write(tmp_path / "2", "a/1.jpg", "b/1.jpg")).identity
    assert first != opened(write(tmp_path / "3", "a/1.jpg", "c/1.jpg")).identity
    (tmp_path / "2" / "a" / "1.jpg").write_bytes(b"longer than before, certainly")
    assert first != opened(tmp_path / "2").identity


def test_pickled_records_read_on(tmp_path: Path) -> None:
    records = opened(write(tmp_path, "a/1.jpg", "b/1.jpg"))
    assert pickle.loads(pickle.dumps(records)).read(np.array([1])) == records.read(np.array([1]))

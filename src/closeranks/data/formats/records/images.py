"""Reads a folder of images by number.

Images in class folders get the class's name and its number, counted over the sorted names (torchvision's ImageFolder
rule: the folder directly below the root is the class, however deep an image is inside it); images directly in the root
have neither. Invariant: an image is the bytes of its file; files that are not images are left out. There is no index:
the listing of the folder serves as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import read_bytes
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, Records
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.record_index.saved_index import IndexLocation

NAME = "images"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
_SPLITS = frozenset(("train", "val", "valid", "validation", "test", "eval"))


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.lower().endswith(SUFFIXES) for info in infos)


def open_records(files: Files, index: IndexLocation) -> Records:
    return ImageRecords(files, index)


class ImageRecords:
    """``{"image": bytes, "label": int, "class": str}``, or ``{"image": bytes}`` without class folders."""

    block = 0

    def __init__(self, files: Files, location: IndexLocation) -> None:
        self._files, self._location = files, location
        infos = [info for info in files.list() if info.name.lower().endswith(SUFFIXES)]
        self._classes = _classes(files, infos)
        numbers = {name: number for number, name in enumerate(self._classes)}
        self._labels = np.fromiter((numbers.get(_class_of(info.name), -1) for info in infos), np.int32, len(infos))
        # One buffer with its ends: names as Python strings would take several times the memory, in every worker.
        names = [info.name.encode("utf-8", "surrogateescape") for info in infos]
        self._names = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        digest = blake3(self._names)
        digest.update(self._ends.tobytes() + np.array([info.num_bytes for info in infos], np.int64).tobytes())
        self.identity = f"{NAME}:{digest.hexdigest(16)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRecords, (self._files, self._location)

    def __len__(self) -> int:
        return len(self._labels)

    def _name(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise DataError(f"there is no number {index} in this data; its indices run from 0 to {len(self) - 1}")
        return self._names[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")

    def read(self, indices: Ints) -> list[Record]:
        return [self._record(index) for index in np.asarray(indices).tolist()]

    def _record(self, index: int) -> Record:
        name = self._name(index)
        with self._files.local_path(name) as path:
            try:
                image = read_bytes(path)
            except OSError as error:
                full = self._files.full_name(name)
                raise DataError(
                    f"'{full}' cannot be read: {error.strerror or error}", "Check its permissions."
                ) from error
        label = int(self._labels[index])
        return {"image": image, "label": label, "class": self._classes[label]} if self._classes else {"image": image}

    def where(self, index: int) -> RecordLocation:
        return RecordLocation(self._files.full_name(self._name(index)), 0)

    def files_of(self, indices: Ints) -> Sequence[str]:
        return [self._name(index) for index in dict.fromkeys(np.asarray(indices).tolist())]

    def close(self) -> None:
        return None


def _class_of(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def _classes(files: Files, infos: Sequence[FileInfo]) -> list[str]:
    if not infos:
        raise DataError(f"'{files.url}' holds no images ({' '.join(SUFFIXES)})")
    counts = Counter(_class_of(info.name) for info in infos)
    num_flat = counts.pop("", 0)
    if num_flat and counts:
        raise DataError(
            f"'{files.url}' holds {num_flat} images of its own beside {len(counts)} folders of images",
            "Put every image into the folder of its class, or all into one folder.",
        )
    if counts and counts.keys() <= _SPLITS and any(info.name.count("/") > 1 for info in infos):
        raise DataError(
            f"'{files.url}' holds the folders {', '.join(sorted(counts))}, which are splits, not classes",
            "Name one of them as the path.",
        )
    return sorted(counts)

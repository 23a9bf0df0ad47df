"""The source of plain text: bytes are the tokens; a sample is ``seq_len`` of them and the one that follows.

Invariant: the same files give the same samples in the same order on every machine; the identity is their content.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.core.protocols import Batch
from closeranks.core.system.regular_file import open_binary
from closeranks.data.config import TextConfig
from closeranks.data.sampling.order import Ints
from closeranks.data.sources.registry import SOURCES, Split, num_held_out

Bytes: TypeAlias = npt.NDArray[np.uint8]

_STDLIB_MAX_BYTES = 8 << 20
# Tests and code tables are poor text; caches, installed packages and build settings differ between machines.
_SKIPPED_FOLDERS = ("test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "config-")
_SKIPPED_FILES = ("test", "_sysconfig")


@dataclass(frozen=True, slots=True)
class _TextFile:
    """A file as it was when listed; a changed file compares unequal, so that no stale text is served."""

    path: str
    num_bytes: int
    changed_ns: int


class TextSource:
    """Samples ``[first, last)`` of a text in memory."""

    def __init__(self, text: Bytes, seq_len: int, first: int, last: int, identity: str) -> None:
        self.identity = identity
        self._windows = np.lib.stride_tricks.sliding_window_view(text, seq_len + 1)[::seq_len][first:last]

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, indices: Ints) -> Batch:
        return {"tokens": torch.from_numpy(self._windows[indices])}


@SOURCES.register("text")
def open_text(config: TextConfig, split: Split, seed: int) -> TextSource | None:
    """The head of the text for training, its tail for evaluation."""
    text, digest = _read(tuple(_list_files(config.path)), _limit(config))
    num_samples = (len(text) - 1) // config.seq_len
    name = f"text '{Path(config.path).name}'"
    if num_samples < 1:
        what = f"{name} has {len(text)} bytes, too short for one sample of data.seq_len = {config.seq_len}"
        raise DataError(what, f"Give at least {config.seq_len + 1} bytes of text, or set a smaller data.seq_len.")
    num_eval = num_held_out(num_samples, config.eval_fraction, name)
    if split == "eval" and num_eval == 0:
        return None
    cut = num_samples - num_eval
    first, last = (0, cut) if split == "train" else (cut, num_samples)
    identity = f"{name} ({split}, seq_len {config.seq_len}, samples {first}:{last}, blake3 {digest})"
    return TextSource(text, config.seq_len, first, last, identity)


def _limit(config: TextConfig) -> int | None:
    return _STDLIB_MAX_BYTES if config.path == "stdlib" and config.max_bytes is None else config.max_bytes


def _list_files(path: str) -> Iterator[_TextFile]:
    """The files of a text, in an order that does not depend on the file system."""
    if path == "stdlib":
        names = list(_stdlib_files(Path(sysconfig.get_path("stdlib"))))
    elif os.path.isdir(path):
        names = list(_folder_files(Path(path)))
    elif os.path.isfile(path):
        names = [Path(path)]
    else:
        raise DataError(f"data.path = '{path}' does not exist", "Name a text file, a folder of them, or 'stdlib'.")
    if not names:
        raise DataError(f"the folder data.path = '{path}' holds no files", "Put text files into it.")
    for name in names:
        status = name.stat()
        yield _TextFile(str(name), status.st_size, status.st_mtime_ns)


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(_SKIPPED_FOLDERS))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES):
                yield Path(folder, name)


def _folder_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


@lru_cache(maxsize=1)
def _read(files: tuple[_TextFile, ...], max_bytes: int | None) -> tuple[Bytes, str]:
    """The text and its digest. Cached, because the training and the evaluation part are opened one after the other."""
    parts: list[bytes] = []
    room = max_bytes if max_bytes is not None else sum(file.num_bytes for file in files)
    for file in files:
        if room <= 0:
            break
        try:
            with open_binary(file.path) as stream:
                parts.append(stream.read(room))
        except OSError as error:
            raise DataError(
                f"cannot read the text '{file.path}': {error.strerror}", "Check its permissions."
            ) from error
        room -= len(parts[-1])
    text = b"".join(parts)
    array = np.frombuffer(text, dtype=np.uint8)
    return array, blake3(text).hexdigest(length=16)

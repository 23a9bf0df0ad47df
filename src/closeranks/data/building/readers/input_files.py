"""Which files does a person mean by the inputs of a build, and what are they?

A file is what its name says; a folder is what most of its bytes are, and what is left out is told. Invariant: the list
is the same on every machine and at every start, sorted by name within each input as it was given.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.core.registry import did_you_mean
from closeranks.data.building.readers.decompress import COMPRESSIONS, RATIO, compression_of, plain_name
from closeranks.data.files.protocol import FileInfo, Files

TEXT, JSONL, TAR, PACKED_MDS, IMAGES = "text", "jsonl", "tar", "mds, compressed", "images"
STORED = ("shards", "parquet", "arrow", "mds", "megatron", "webdataset", IMAGES, "numpy", "tfrecord")
"""Formats that are read where they lie, by number of record."""
KINDS = (TEXT, JSONL, TAR, PACKED_MDS, *STORED)

_ENDINGS = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    ".mds": "mds",
    ".idx": "megatron",
    ".tar": "webdataset",
    ".npy": "numpy",
    ".npz": "numpy",
    **dict.fromkeys(
        (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"),
        IMAGES,
    ),
    ".crs": "shards",
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
}
_PART = re.compile(r"-\d+-of-\d+$")
"""``train.tfrecord-00000-of-00008`` is a ``train.tfrecord``."""
_TARS = {
    **{f".tar{suffix}": compression for suffix, compression in COMPRESSIONS.items()},
    ".tgz": "gz",
    ".tbz2": "bz2",
    ".txz": "xz",
}
_NEVER_TEXT = (
    *(
        ".pyc",
        ".pyo",
        ".so",
        ".o",
        ".a",
        ".dll",
        ".exe",
        ".zip",
        ".whl",
        ".7z",
        ".rar",
        ".lz4",
        ".br",
        ".snappy",
        ".pdf",
    ),
    *(".ico", ".mp3", ".mp4", ".wav", ".flac", ".avi", ".mov", ".woff", ".woff2", ".ttf"),
    *(".pkl", ".pickle", ".pt", ".pth", ".bin", ".safetensors", ".h5", ".hdf5", ".db", ".sqlite", ".mo"),
)


@dataclass(frozen=True, slots=True)
class BuildInput:
    """One file, or (``name`` is empty) all files of a folder that a format reads as one."""

    root: int
    """Which of the places given holds it."""
    name: str
    kind: str
    num_bytes: int

    @property
    def compression(self) -> str:
        if self.kind == TAR:
            return next(packed for suffix, packed in _TARS.items() if self.name.lower().endswith(suffix))
        return compression_of(self.name) if self.kind in (TEXT, JSONL, PACKED_MDS) else ""

    @property
    def content_bytes(self) -> int:
        """About how many bytes it holds when it is not compressed."""
        return self.num_bytes * (RATIO if self.compression else 1)


@dataclass(frozen=True, slots=True)
class FoundInputs:
    """What lies at one of the places given."""

    inputs: tuple[BuildInput, ...]
    left_out: tuple[str, ...] = ()
    """Names of files that are something else."""


def kind_of(name: str, siblings: frozenset[str] = frozenset()) -> str:
    """What a file is by its name; empty for what no build reads. ``siblings``: all names beside it."""
    lower = name.lower()
    if lower.endswith(tuple(_TARS)):
        return TAR
    suffix = PurePosixPath(_PART.sub("", plain_name(lower))).suffix
    if suffix == ".bin" and name[: -len(".bin")] + ".idx" in siblings:
        return "megatron"
    if compression_of(lower) and _ENDINGS.get(suffix, TEXT) not in (TEXT, JSONL):
        return {".mds": PACKED_MDS}.get(suffix, "tfrecord" if _ENDINGS[suffix] == "tfrecord" else "")
    if PurePosixPath(name).name == "index.json" and any(".mds" in sibling for sibling in siblings):
        return "mds"
    if suffix in _NEVER_TEXT:
        return ""
    return _ENDINGS.get(suffix, TEXT)


def classify_inputs(infos: Sequence[FileInfo], root: int, is_folder: bool, wanted: str = "") -> FoundInputs:
    """The inputs among the files of one place. ``wanted``: a kind that was asked for, whatever names say."""
    names = frozenset(info.name for info in infos)
    kinds = {info.name: kind_of(info.name, names) for info in infos}
    chosen = wanted or (_heaviest(infos, kinds) if is_folder else kinds[infos[0].name] or TEXT)
    if chosen in STORED:
        total = sum(info.num_bytes for info in infos if kinds[info.name] == chosen) or sum(i.num_bytes for i in infos)
        return FoundInputs((BuildInput(root, "", chosen, total),), ())
    taken = [info for info in infos if kinds[info.name] == chosen or not is_folder]
    if wanted and not taken:
        taken = list(infos)
    names = names - {info.name for info in taken}
    left_out = tuple(info.name for info in infos if info.name in names)
    return FoundInputs(tuple(BuildInput(root, info.name, chosen, info.num_bytes) for info in taken), left_out)


def _heaviest(infos: Iterable[FileInfo], kinds: dict[str, str]) -> str:
    """What most of the bytes are; of equals, the one whose name comes first in ``KINDS``."""
    weights: Counter[str] = Counter()
    for info in infos:
        weights[kinds[info.name]] += info.num_bytes + 1  # empty files count, too
    weights.pop("", None)
    if weights[PACKED_MDS]:  # its index says nothing without them
        weights.pop("mds", None)
    return max(KINDS, key=lambda kind: weights[kind]) if weights else TEXT


def find_inputs(places: Sequence[Files], given: Sequence[str], wanted: str = "") -> list[FoundInputs]:
    """What lies at each place; nothing at all, or nothing that can be read, is a mistake in the place."""
    if wanted and wanted not in KINDS:
        raise DataError(f"there is no format '{wanted}'", did_you_mean(wanted, KINDS))
    found = []
    for root, (files, text) in enumerate(zip(places, given, strict=True)):
        infos = files.list()
        if not infos:
            raise DataError(f"'{text}' holds no files", "Name a file, a folder of files, or a URL of those.")
        is_folder = len(infos) > 1 or not _names_file(text, infos[0].name)
        one = classify_inputs(infos, root, is_folder, wanted)
        if not one.inputs:
            what = f"'{text}' holds nothing to build from: {_listed([info.name for info in infos])}"
            raise DataError(
                what, "Name text, JSONL, Parquet, tar or other data files, or say what it is with --format."
            )
        found.append(one)
    return found


def _names_file(text: str, name: str) -> bool:
    return PurePosixPath(text.partition("?")[0]).name == name


def _listed(names: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def fingerprint(places: Sequence[Files], given: Sequence[str]) -> str:
    """Changes when any file of the inputs may have changed: its name, size or version."""
    digest = blake3()
    for files, text in zip(places, given, strict=True):
        digest.update(f"{text}\0".encode())
        for info in files.list():
            digest.update(f"{info.name}\0{info.num_bytes}\0{info.version}\0".encode(errors="surrogateescape"))
    return digest.hexdigest(length=16)

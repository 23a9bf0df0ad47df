"""Finds the input files of a build and their formats.

The format of a file follows from its name; that of a folder is the one with the most bytes, and files of other formats
are reported. Invariant: the list is the same on every machine and in every run: in the order of the inputs given,
sorted by name within each.
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
"""Formats that are read in place, by record number."""
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
"""``train.tfrecord-00000-of-00008`` counts as ``train.tfrecord``."""
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
    """One file, or (if ``name`` is empty) all files of a folder that a format reads as one."""

    root: int
    """Index of the given input folder that contains it."""
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
        """Estimated bytes of its uncompressed content."""
        return self.num_bytes * (RATIO if self.compression else 1)


@dataclass(frozen=True, slots=True)
class FoundInputs:
    """The inputs found in one of the given folders."""

    inputs: tuple[BuildInput, ...]
    left_out: tuple[str, ...] = ()
    """Names of files of other formats."""


def kind_of(name: str, siblings: frozenset[str] = frozenset()) -> str:
    """The kind of a file by its name; empty for files that no build reads. ``siblings``: all names in the same
    folder."""
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
    """The inputs among the files of one folder. ``wanted``: a kind that was requested, whatever the names say."""
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
    """The kind with the most bytes; among equals, the one that comes first in ``KINDS``."""
    weights: Counter[str] = Counter()
    for info in infos:
        weights[kinds[info.name]] += info.num_bytes + 1  # empty files count, too
    weights.pop("", None)
    if weights[PACKED_MDS]:  # its index is useless without them
        weights.pop("mds", None)
    return max(KINDS, key=lambda kind: weights[kind]) if weights else TEXT


def find_inputs(places: Sequence[Files], given: Sequence[str], wanted: str = "") -> list[FoundInputs]:
    """The inputs in each folder; an error if there is nothing, or nothing readable."""
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

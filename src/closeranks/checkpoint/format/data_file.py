"""Writes the data file of one rank, with a digest of every byte, and reads it back.

It is one valid safetensors file, written front to back: the header (all sizes are known beforehand), then the chunks,
without gaps. Two threads share the work, both outside the GIL: one writes, the other computes digests and compares the
memory with the checksum from the source, at most ``_LAG`` chunks behind. Invariants: ``write_data_file`` returns only
when the file is durable and all of its bytes matched the source; ``read_back`` has read every byte again from the
medium. Imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from closeranks.checkpoint.format.digests import blake3_hex, crc32c, layout_independent_digest
from closeranks.checkpoint.format.manifest import Chunk, DataFile
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.protocol import Storage

FIRST_BYTES = declare_failpoint(
    "save.first_bytes", "the header and the first chunk of a data file were passed to storage"
)
HALF_WAY = declare_failpoint("save.half_way", "half of a data file's chunks were passed to storage")
DATA_WRITTEN = declare_failpoint(
    "save.data_written", "all of a data file was passed to storage, none of it durable yet"
)
DATA_DURABLE = declare_failpoint("save.data_durable", "a data file is durable")

_ALIGNMENT = 4096
"""The first tensor begins at a page boundary, so that files can be mapped, and written with direct I/O."""
_LAG = 8
"""Chunks that may wait for their digests: the most that a copying source (a device, an object store) holds."""
_READ_BYTES = 4 << 20
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}

ChunkSource = Callable[[int], memoryview]
"""The bytes of the n-th chunk of a save; called from one thread."""


class SaveError(Exception):
    """This save cannot be committed; ``str`` is one sentence."""


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    blake3: str
    digest_term: int


@dataclass(frozen=True, slots=True)
class DataFilePlan:
    """Header and offsets of a data file, before it is written."""

    header: bytes
    """The eight bytes of length and the JSON, padded with spaces."""
    offsets: tuple[int, ...]
    """Offset of each chunk from the file's first byte."""
    num_bytes: int


def plan_data_file(chunks: Sequence[Chunk]) -> DataFilePlan:
    """Dtypes that safetensors does not define are written as plain bytes; the manifest has the dtype."""
    ends = list(accumulate((chunk.num_bytes for chunk in chunks), initial=0))
    rows: dict[str, object] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for chunk, begin, end in zip(chunks, ends, ends[1:], strict=False):
        name = f"{chunk.section}/{chunk.key}#{seen[chunk.section, chunk.key]}"
        seen[chunk.section, chunk.key] += 1
        is_known = chunk.dtype in _NAMES
        shape = list(chunk.piece.local_shape) if is_known else [chunk.num_bytes]
        rows[name] = {"dtype": _NAMES.get(chunk.dtype, "U8"), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return DataFilePlan(header, tuple(len(header) + begin for begin in ends[:-1]), len(header) + ends[-1])


def digest_chunk(chunk: Chunk, data: memoryview) -> ChunkDigests:
    """The digests of a chunk, after checking that its bytes still match the source's checksum."""
    check_chunk(chunk, data)
    return ChunkDigests(blake3_hex(data), layout_independent_digest(data, chunk.dtype, chunk.piece))


def check_chunk(chunk: Chunk, data: memoryview) -> None:
    if data.nbytes != chunk.num_bytes or crc32c(data) != chunk.crc32c:
        raise SaveError(f"memory changed between copy and write: {chunk.section}/{chunk.key} is not what it was")


def write_data_file(
    storage: Storage,
    path: str,
    chunks: Mapping[int, Chunk],
    source: ChunkSource,
    known: Mapping[int, ChunkDigests],
    check_cancelled: Callable[[], None],
) -> tuple[DataFile, DataFilePlan, dict[int, ChunkDigests]]:
    """Write the chunks, keyed by their index in the save; ``check_cancelled`` runs between them and may raise to
    cancel.

    Chunks with ``known`` digests are only compared with their checksum.
    """
    plan = plan_data_file(tuple(chunks.values()))
    sink = storage.create(path, plan.num_bytes)
    hasher = ThreadPoolExecutor(1, "digests")
    try:
        sink.write(plan.header)
        digests = _stream(sink.write, chunks, source, known, check_cancelled, hasher)
        failpoint(DATA_WRITTEN)
        sink.close()
        found = {number: future.result() for number, future in digests.items()}
    except BaseException:
        hasher.shutdown(wait=True, cancel_futures=True)  # it reads memory that is about to be released
        sink.abort()
        raise
    hasher.shutdown(wait=True)
    failpoint(DATA_DURABLE)
    file = DataFile(path.rpartition("/")[2], plan.num_bytes, len(plan.header), crc32c(plan.header))
    return file, plan, {**found, **{number: known[number] for number in chunks if number in known}}


def _stream(
    put: Callable[[memoryview], None],
    chunks: Mapping[int, Chunk],
    source: ChunkSource,
    known: Mapping[int, ChunkDigests],
    check_cancelled: Callable[[], None],
    hasher: ThreadPoolExecutor,
) -> dict[int, Future[ChunkDigests]]:
    digests: dict[int, Future[ChunkDigests]] = {}
    pending: deque[Future[ChunkDigests]] = deque()
    for place, (number, chunk) in enumerate(chunks.items()):
        data = source(number)
        if number in known:
            check_chunk(chunk, data)
        else:
            digests[number] = hasher.submit(digest_chunk, chunk, data)
            pending.append(digests[number])
        put(data)
        del data
        failpoint(FIRST_BYTES)
        if place == len(chunks) // 2:
            failpoint(HALF_WAY)
        while len(pending) > _LAG or (pending and pending[0].done()):
            pending.popleft().result()  # a mismatch fails the save here, not after the last byte
        check_cancelled()
    return digests


def read_back(
    storage: Storage, path: str, file: DataFile, chunks: Iterable[Chunk], check_cancelled: Callable[[], None]
) -> None:
    """Compare the checksum of every byte on the medium with that of the source."""
    wanted = [(file.header_bytes, file.header_crc32c, "its header")]
    wanted += [(chunk.num_bytes, chunk.crc32c, f"{chunk.section}/{chunk.key}") for chunk in chunks]
    pieces = storage.read_fresh(path, _READ_BYTES)
    rest: memoryview = memoryview(b"")
    for num_bytes, expected, what in wanted:
        value, left = 0, num_bytes
        while left:
            if not rest:
                rest = memoryview(next(pieces, b""))
                check_cancelled()
                if not rest:
                    raise SaveError(f"{storage.url}/{path} came back {left} bytes short of {what}")
            value = crc32c(rest[:left], value)
            rest, left = rest[left:], left - min(left, len(rest))
        if value != expected:
            raise SaveError(f"{storage.url}/{path} was read back from storage with different bytes in {what}")
    if rest or any(pieces):
        raise SaveError(f"{storage.url}/{path} was read back longer than it was written")

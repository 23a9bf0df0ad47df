"""The file format of a shard.

    header | data | index | notes | checksums | footer

Everything before the checksums is divided into blocks of ``block_bytes``, counted from the first byte of the file, and
each has its CRC32C; the checksums have a BLAKE3 in the footer, the footer a CRC32C of its own. Invariant: these cover
every byte, so that any single flipped bit is found, and the position of each region follows from four numbers alone
(``ShardRegions``). Pure: bytes in, values out. The page docs/data-format.md specifies the same for readers without this
program.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from crc32c import crc32c

N = TypeVar("N", int, npt.NDArray[np.int64])
Kind: TypeAlias = Literal["tokens", "records"]

VERSION = 1
HEADER_BYTES = 64
FOOTER_BYTES = 128
DATA_OFFSET = 4096
BLOCK_BYTES = 32 << 10
"""A block is the unit of checking: smaller ones make the first access to a sample cheaper, larger ones the tables
smaller. At 32 KiB the check takes 4 µs, and the checksums are an eight-thousandth of the data."""
SUFFIX = ".crs"

_HEADER_MAGIC = b"CRSHARD\n"
_FOOTER_MAGIC = b"CRSFOOT\n"
_KINDS: tuple[Kind, ...] = ("tokens", "records")
TOKEN_DTYPES = {"uint8": 1, "uint16": 2, "uint32": 3, "int32": 4, "int64": 5}
"""The code of each dtype in header and footer; 0 means records."""
_DTYPE_OF = {0: "", **{code: name for name, code in TOKEN_DTYPES.items()}}

_HEADER = struct.Struct("<8sIIIIQ")
_FOOTER = struct.Struct("<8sIIIIQQQQQQQ")
_CRC = struct.Struct("<I")


class UnsoundShard(Exception):
    """A shard that is not what it should be; ``str`` gives the reason, without the file's name."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard holds."""

    kind: Kind
    dtype: str
    """The dtype of tokens; empty for records."""
    block_bytes: int

    @property
    def unit_bytes(self) -> int:
        """Data is counted in tokens, or in bytes of records."""
        return np.dtype(self.dtype).itemsize if self.dtype else 1


@dataclass(frozen=True, slots=True)
class ShardRegions(Generic[N]):
    """The positions of a shard's regions; with arrays instead of numbers, those of many shards at once."""

    num_items: N
    """Documents or records."""
    data_bytes: N
    notes_bytes: N
    block_bytes: int

    @property
    def index_offset(self) -> N:
        return round_up(DATA_OFFSET + self.data_bytes, 8)

    @property
    def notes_offset(self) -> N:
        return self.index_offset + 8 * (self.num_items + 1)

    @property
    def table_offset(self) -> N:
        return round_up(self.notes_offset + self.notes_bytes, 8)

    @property
    def num_blocks(self) -> N:
        return -(-self.table_offset // self.block_bytes)

    @property
    def footer_offset(self) -> N:
        return round_up(self.table_offset + 4 * self.num_blocks, 8)

    @property
    def num_bytes(self) -> N:
        return self.footer_offset + FOOTER_BYTES


@dataclass(frozen=True, slots=True)
class ShardFooter:
    head: ShardHeader
    shape: ShardRegions[int]
    largest: int
    """The largest token id; 0 for records, and if there are no tokens."""
    table_blake3: bytes

    @property
    def num_units(self) -> int:
        return self.shape.data_bytes // self.head.unit_bytes


def round_up(number: N, step: int) -> N:
    return -(-number // step) * step


def encode_header(head: ShardHeader) -> bytes:
    kind, dtype = _KINDS.index(head.kind), TOKEN_DTYPES.get(head.dtype, 0)
    body = _HEADER.pack(_HEADER_MAGIC, VERSION, kind, dtype, head.block_bytes, DATA_OFFSET)
    body = body.ljust(HEADER_BYTES - 4, b"\0")
    return body + _CRC.pack(crc32c(body))


def encode_footer(footer: ShardFooter) -> bytes:
    head, shape = footer.head, footer.shape
    body = _FOOTER.pack(
        _FOOTER_MAGIC,
        VERSION,
        _KINDS.index(head.kind),
        TOKEN_DTYPES.get(head.dtype, 0),
        head.block_bytes,
        shape.num_items,
        shape.data_bytes,
        shape.notes_bytes,
        shape.num_blocks,
        shape.table_offset,
        shape.num_bytes,
        footer.largest,
    )
    body = (body + footer.table_blake3).ljust(FOOTER_BYTES - 4, b"\0")
    return body + _CRC.pack(crc32c(body))


def decode_footer(data: bytes, num_bytes: int) -> ShardFooter:
    """From the last bytes of a file of ``num_bytes``."""
    if len(data) != FOOTER_BYTES or data[:8] != _FOOTER_MAGIC:
        raise UnsoundShard("it does not end in a footer: it is truncated, or was never finished")
    if _CRC.unpack(data[-4:])[0] != crc32c(data[:-4]):
        raise UnsoundShard("its footer does not match the footer's checksum")
    _, version, kind, dtype, block_bytes, items, size, notes, blocks, table, total, largest = _FOOTER.unpack_from(data)
    if version > VERSION:
        raise UnsoundShard(f"it has format version {version}, and this program reads up to {VERSION}")
    if kind >= len(_KINDS) or dtype not in _DTYPE_OF or block_bytes < 4096 or block_bytes & (block_bytes - 1):
        raise UnsoundShard("its footer makes no sense")
    head = ShardHeader(_KINDS[kind], _DTYPE_OF[dtype], block_bytes)
    shape = ShardRegions(items, size, notes, block_bytes)
    if (blocks, table, total) != (shape.num_blocks, shape.table_offset, shape.num_bytes):
        raise UnsoundShard("its footer contradicts itself")
    if size % head.unit_bytes or (head.kind == "tokens") != bool(head.dtype):
        raise UnsoundShard("its footer contradicts itself")
    if total != num_bytes:
        raise UnsoundShard(f"it has {num_bytes} bytes instead of {total}")
    start = _FOOTER.size
    footer = ShardFooter(head, shape, largest, data[start : start + 32])
    if encode_footer(footer) != data:
        raise UnsoundShard("its footer has data in unused bytes")
    return footer


def check_header(data: bytes, head: ShardHeader) -> None:
    if data != encode_header(head):
        raise UnsoundShard("its header is damaged, or of another shard")


def check_table(data: bytes, footer: ShardFooter) -> npt.NDArray[np.uint32]:
    """The CRC32C of each block, from the bytes between the last block and the footer."""
    if blake3(data).digest() != footer.table_blake3:
        raise UnsoundShard("its table of checksums does not match the footer")
    return np.frombuffer(data, dtype="<u4", count=footer.shape.num_blocks)


def footer_digest(data: bytes) -> str:
    """Identifies a shard's content in ``dataset.json``: through the checksums it covers every byte."""
    return str(blake3(data).hexdigest())

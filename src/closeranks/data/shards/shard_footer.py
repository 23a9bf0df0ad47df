"""Checks that a file is the shard it should be, from its header and footer, without reading its data.

Invariant: a file that passes has its size, header, footer and table of checksums as they were written, and is the shard
that ``dataset.json`` lists.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from closeranks.data.shards.manifest import ShardEntry
from closeranks.data.shards.shard_format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    ShardFooter,
    ShardHeader,
    UnsoundShard,
    check_header,
    check_table,
    decode_footer,
    footer_digest,
)
from closeranks.storage.disk import read_range


def read_footer(
    fd: int, entry: ShardEntry | None = None, head: ShardHeader | None = None
) -> tuple[ShardFooter, npt.NDArray[np.uint32]]:
    """A shard's footer and the checksums of its blocks, checked against each other, the header and its entry in
    ``dataset.json`` (None: there is none yet)."""
    num_bytes = os.fstat(fd).st_size
    data = os.pread(fd, FOOTER_BYTES, max(0, num_bytes - FOOTER_BYTES))
    expected = entry.regions(head.block_bytes).num_bytes if entry and head else num_bytes
    if num_bytes != expected:
        raise UnsoundShard(f"it has {num_bytes} bytes, and {expected} were written")
    footer = decode_footer(data, num_bytes)
    if entry and (footer_digest(data) != entry.blake3 or footer.head != head):
        raise UnsoundShard("it is not the shard that was written under this name: its footer differs")
    check_header(os.pread(fd, HEADER_BYTES, 0), footer.head)
    shape = footer.shape
    table = read_range(fd, shape.table_offset, shape.footer_offset - shape.table_offset)
    return footer, check_table(table, footer)

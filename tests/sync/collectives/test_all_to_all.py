"""Bytes that ranks hand each other: every row finds its place, in whatever number of pieces it goes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.parallel.process_group import RankGroup
from closeranks.sync.collectives import all_to_all
from closeranks.testing import run_world

pytestmark = pytest.mark.world
SIZE, LENGTH = 3, 1000


def message(source: int, target: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * source + target)
    return torch.randint(256, (LENGTH,), generator=generator, dtype=torch.uint8)


def exchange(piece_bytes: int) -> bool:
    """Two exchanges under way at once, in a group whose ranks go by other numbers than the world's."""
    all_to_all._PIECE_BYTES = piece_bytes
    members = [2, 0, 1]
    made = dist.new_group(members)
    rank = dist.get_group_rank(made, dist.get_rank())
    group = RankGroup(rank, SIZE, made)
    others = [peer for peer in range(SIZE) if peer != rank]
    arriving = torch.zeros(SIZE - 1, LENGTH, dtype=torch.uint8)
    outgoing = torch.stack([message(rank, peer) for peer in others])
    gathered = torch.zeros(SIZE, LENGTH, dtype=torch.uint8)
    under_way = [
        all_to_all.all_to_all(arriving, outgoing, group),
        all_to_all.all_gather(gathered, message(rank, rank), group),
    ]
    for one in under_way:
        one.wait()
    is_swapped = all(torch.equal(row, message(peer, rank)) for row, peer in zip(arriving, others, strict=True))
    return is_swapped and all(torch.equal(gathered[peer], message(peer, peer)) for peer in others)


@pytest.mark.parametrize("piece_bytes", [64, 999, 1000, 1 << 19])
def test_every_row_finds_its_place(piece_bytes: int) -> None:
    assert run_world(exchange, SIZE, piece_bytes) == [True] * SIZE

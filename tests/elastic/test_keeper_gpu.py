"""Copies of a device's tensors: what was there when the step was committed, whatever comes after ``join``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from closeranks.core.pieces import Piece
from closeranks.elastic.devices import HALF_BYTES
from closeranks.elastic.keeper import Berths, Keeper
from closeranks.elastic.recalling import Recalled
from closeranks.elastic.slots import About, Sealed, check
from closeranks.elastic.sources import Holding
from tests.elastic.boxes import make_boxes, shared_memory

pytestmark = pytest.mark.gpu

ABOUT = About(generation=0, step=1, image="p0-s0-t0", num_images=1)


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def holdings() -> list[Holding]:
    """Larger than both halves of what copies pass through, with small ones, an empty one and one on the CPU."""
    shapes = [(3 * HALF_BYTES // 4,), (7,), (0, 3), (1024, 1500), ()]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    tensors += [
        torch.randn(40, 30, device="cuda").t(),
        torch.ones(5, dtype=torch.bfloat16, device="cuda"),
        torch.ones(3),
    ]
    named = enumerate(tensors)
    return [Holding("model", f"t{n}", Piece.whole(f"t{n}", tuple(t.shape)), t, is_steady=n != 1) for n, t in named]


def test_a_copy_is_of_the_committed_state(place: Path) -> None:
    one, other = make_boxes(place, 2)
    kept = Keeper(Berths((one[0], one[1]), (other[2], other[3])))
    held = holdings()
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(3):
        for item in held:
            item.tensor.add_(1.0)
        expected = [item.tensor.clone() for item in held]
        kept.begin(replace(ABOUT, step=step), held, b"{}")
        held[1].tensor.mul_(2.0)  # a buffer: forward changes it at once
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)
        joined = kept.join()
        assert joined is not None
        assert joined.is_sealed
        for item in held:
            item.tensor.sub_(0.25)  # the optimizer
        for path in (one[step % 2], other[2 + step % 2]):
            assert check(Sealed(path)) == ""
            recalled = Recalled([Sealed(path)])
            for item, was in zip(held, expected, strict=True):
                fresh = torch.zeros_like(item.tensor)
                recalled.read_into(item.section, item.key, item.piece, fresh)
                assert torch.equal(fresh, was), item.key
    kept.close()

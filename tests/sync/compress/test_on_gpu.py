"""Codes on a GPU: the same as on a CPU, and the host is never waited for."""

from __future__ import annotations

import pytest
import torch

from closeranks.core.pieces import Piece
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec, ParameterSpan
from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.error_feedback import StagedTensor
from closeranks.sync.compress.half_precision import BFloat16Codec, Float16Codec
from closeranks.sync.compress.int8 import Int8Codec
from closeranks.sync.compress.onebit import OneBitCodec
from closeranks.sync.compress.powersgd import orthogonalize
from closeranks.sync.compress.topk import TopKCodec

pytestmark = pytest.mark.gpu

CODECS: list[Codec] = [BFloat16Codec(), Float16Codec(), Int8Codec(), OneBitCodec(), TopKCodec(0.01)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("numel", [7, 5001, 300_000])
def test_codes_mean_what_they_do_on_a_cpu(codec: Codec, numel: int) -> None:
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(1))
    there = rows.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes = codec.encode(there)
        decoded = codec.decode(codes, numel, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tuple(codes.shape) == (3, codec.num_bytes(numel))
    # Sums of a block may be added up in another order.
    torch.testing.assert_close(decoded.cpu(), codec.decode(codec.encode(rows), numel, torch.float32), rtol=1e-5, atol=0)


def test_memory_settles_and_gaps_are_cleared_without_the_host() -> None:
    spans = (ParameterSpan(Piece.whole("a", (40,)), 0, 0, 40), ParameterSpan(Piece.whole("b", (50,)), 64, 0, 50))
    spec = FlatBufferSpec(spans, 128, torch.float32, torch.device("cuda"))
    memory, taken = StagedTensor(torch.zeros(128, device="cuda")), torch.ones((), device="cuda")
    assert spec.padding_indices is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = torch.ones(128, device="cuda")
        spec.zero_padding(value)
        memory.write(value)
        memory.commit(taken)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert memory.committed.sum().item() == 90


def test_columns_become_orthonormal() -> None:
    matrices = torch.randn(5, 300, 4, generator=torch.Generator().manual_seed(2)).cuda()
    found = orthogonalize(matrices)
    torch.testing.assert_close(found.mT @ found, torch.eye(4, device="cuda").expand(5, 4, 4), rtol=0, atol=1e-5)

"""Each code: as long as it says, never further off than it says, and loud about what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.sync.compress.build import CODECS, describe_compression
from closeranks.sync.compress.codec import Codec
from closeranks.sync.compress.half_precision import BFloat16Codec, Float16Codec
from closeranks.sync.compress.int8 import STEPS, Int8Codec
from closeranks.sync.compress.onebit import BLOCK, OneBitCodec
from closeranks.sync.compress.topk import TopKCodec
from closeranks.sync.config import CompressConfig
from tests.sync.compress.names import COMPRESSORS

REGISTERED = [make(CompressConfig()) for make in CODECS.values()]
each_codec = pytest.mark.parametrize("codec", [*REGISTERED, TopKCodec(0.3)], ids=lambda codec: type(codec).__name__)


def test_every_name_of_the_config_is_built_and_described() -> None:
    assert set(COMPRESSORS) == {*CODECS, "powersgd"}
    for name in COMPRESSORS:
        said = describe_compression(CompressConfig.model_validate({"name": name}), "gradients")
        assert "gradients are sent" in said


def round_trip(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)


@each_codec
@given(
    num_rows=st.integers(1, 3),
    numel=st.sampled_from([1, 7, 8, 255, 256, 257, 2047, 2049, 5000, 40_000]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
    power=st.sampled_from([1, 5]),
)
def test_it_keeps_what_it_promises(
    codec: Codec, num_rows: int, numel: int, seed: int, dtype: torch.dtype, size: float, power: int
) -> None:
    rows = torch.randn(num_rows, numel, dtype=dtype, generator=torch.Generator().manual_seed(seed)) ** power * size
    codes = codec.encode(rows)
    assert codes.dtype == torch.uint8
    assert tuple(codes.shape) == (num_rows, codec.num_bytes(numel))
    decoded = codec.decode(codes, numel, dtype)
    assert decoded.dtype == dtype
    lost, whole = (rows - decoded).square().sum(1), rows.square().sum(1)
    assert (lost <= (1 - codec.contraction(numel) + 1e-6) * whole).all()


@each_codec
def test_rows_do_not_touch_each_other(codec: Codec) -> None:
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    together = round_trip(codec, rows)
    for number in range(3):
        assert torch.equal(round_trip(codec, rows[number : number + 1])[0], together[number])


@each_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(codec: Codec, value: float) -> None:
    rows = torch.randn(2, 3000, generator=torch.Generator().manual_seed(2))
    rows[1, 17] = value
    decoded = round_trip(codec, rows)
    assert decoded[0].isfinite().all()
    assert not decoded[1].isfinite().all()


@each_codec
def test_nothing_stays_nothing_where_a_code_knows_zero(codec: Codec) -> None:
    decoded = round_trip(codec, torch.zeros(2, 3000))
    assert torch.equal(decoded, torch.zeros(2, 3000)), "the mean size of nothing is zero, whatever its sign"


def test_int8_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(1, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    blocks = rows.view(-1, 256)
    off = (rows - round_trip(Int8Codec(), rows)).view(-1, 256).abs().amax(1)
    assert (off <= blocks.abs().amax(1) / (2 * STEPS) * 1.001).all()


def test_one_bit_is_the_sign_times_the_mean_size() -> None:
    rows = torch.randn(1, BLOCK + 100, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    decoded = round_trip(OneBitCodec(), rows)
    for part in (slice(0, BLOCK), slice(BLOCK, None)):
        mean = rows[0, part].abs().mean()
        torch.testing.assert_close(decoded[0, part], rows[0, part].sign() * mean, rtol=1e-6, atol=0)


def test_top_k_are_the_largest_of_each_block() -> None:
    rows = torch.randn(1, 40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    decoded = round_trip(TopKCodec(0.01), rows)
    block = -(-40_000 // 3)
    for first in range(0, 40_000, block):
        own, got = rows[0, first : first + block], decoded[0, first : first + block]
        largest = own.abs().topk(-(-block // 100)).indices
        assert set(got.nonzero().view(-1).tolist()) == set(largest.tolist())
        torch.testing.assert_close(got[largest], own[largest], rtol=2.0**-8, atol=0)


@pytest.mark.parametrize(
    ("codec", "least"),
    [
        (BFloat16Codec(), 2.0),
        (Float16Codec(), 1.99),
        (Int8Codec(), 3.9),
        (OneBitCodec(), 31.0),
        (TopKCodec(0.01), 98.0),
    ],
)
def test_how_much_less_travels_of_a_large_load(codec: Codec, least: float) -> None:
    numel = 4_000_000
    assert 4 * numel / codec.num_bytes(numel) >= least

"""Times of matrix products: never faster than the device, and slower where a shape fits it badly."""

from __future__ import annotations

import pytest

from closeranks.facts.device_table import built_in_devices
from closeranks.facts.timing.products import ProductModel, product_seconds

A100 = built_in_devices().device("a100")
MODEL = ProductModel()


def speed(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / product_seconds(m, n, k, A100, "fp16", MODEL)


def test_a_large_product_reaches_nearly_what_the_device_can() -> None:
    assert 0.9 < speed(16_384, 16_384, 16_384) / A100.reachable("fp16") <= 1


@pytest.mark.parametrize("shape", [(4096, 4096, 64), (128, 4096, 4096), (4096, 4000, 4096 + 8), (4096, 4096, 4095)])
def test_a_shape_that_fits_badly_is_slower(shape: tuple[int, int, int]) -> None:
    assert speed(*shape) < 0.95 * speed(4096, 4096, 4096)


def test_a_started_wave_costs_nearly_a_whole_one() -> None:
    full, started = 108 * 128, 109 * 128
    assert product_seconds(started, 256, 8192, A100, "fp16", MODEL) > 1.3 * product_seconds(
        full, 256, 8192, A100, "fp16", MODEL
    )


def test_a_thin_product_waits_for_memory() -> None:
    moved = 2 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
    assert product_seconds(16, 8192, 8192, A100, "fp16", MODEL) >= moved / A100.memory_bytes_per_s

"""Operations are measured as often as their time allows, and leave nothing behind."""

from __future__ import annotations

import torch

from closeranks.facts.calibration import AttentionTime
from closeranks.lab.calibrate import kernels, workers
from closeranks.lab.calibrate.calibrate import _fastest
from closeranks.lab.calibrate.shapes import AttentionPlace, ProductShape
from closeranks.lab.calibrate.timer import DeviceTimer

TIMER = DeviceTimer(torch.device("cpu"), budget_s=0.001, least_reps=1)


def test_a_larger_product_takes_longer() -> None:
    shapes = [ProductShape(16, 16, 16), ProductShape(1024, 1024, 1024)]
    small, large = kernels.measure_products(TIMER, "fp32", shapes, lambda: True)
    assert (small.m, large.m) == (16, 1024)
    assert 0 < small.seconds < large.seconds


def test_what_there_is_no_time_for_is_left_out() -> None:
    left = iter([True, False])
    shapes = [ProductShape(16, 16, 16), ProductShape(32, 32, 32)]
    assert [one.m for one in kernels.measure_products(TIMER, "bf16", shapes, lambda: next(left))] == [16]


def test_attention_with_shared_heads_forward_and_backward() -> None:
    (found,) = kernels.measure_attention(TIMER, "fp32", [AttentionPlace(1, 4, 2, 32, 8)], lambda: True)
    assert (found.num_heads, found.seq_len) == (4, 32)
    assert found.forward_s > 0
    assert found.backward_s > 0


def test_nothing_larger_than_the_memory_is_measured() -> None:
    passes = kernels.measure_memory(TIMER, memory_bytes=1 << 20)
    assert [one.num_bytes for one in passes] == [1 << 14, 1 << 16, 1 << 18]
    assert [one.num_params for one in kernels.measure_optimizer(TIMER, memory_bytes=1 << 20)] == [10_000]
    assert kernels.measure_dispatch(TIMER) > 0
    assert kernels.measure_selective(TIMER) > 0, "each operation passes through Python"


def test_a_worker_that_takes_twice_as_long() -> None:
    base, found = workers.LoopTimes(1.0, 2.0), workers.LoopTimes(2.0, 3.0)
    slower = workers.slowdown(4, base, found)
    assert (slower.num_workers, slower.products, slower.memory) == (4, 2.0, 1.5)


def test_the_fastest_of_several_passes_counts() -> None:
    times = [AttentionTime("fp32", 1, 2, 8, 4, forward, backward) for forward, backward in ((2.0, 3.0), (4.0, 1.0))]
    other = AttentionTime("fp32", 1, 2, 16, 4, 9.0, 9.0)
    assert _fastest([times[0], other, times[1]]) == (AttentionTime("fp32", 1, 2, 8, 4, 2.0, 1.0), other)
    assert workers.fastest([workers.LoopTimes(1.0, 4.0), workers.LoopTimes(2.0, 3.0)]) == workers.LoopTimes(1.0, 3.0)

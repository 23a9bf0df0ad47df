import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.events import FlopsCounted, RunStarted
from closeranks.telemetry.live.throughput import MeterReading, ThroughputMeter, efficiency
from tests.telemetry.conftest import step

GPU = RunStarted(world_size=2, last_step=200, flops_per_item=1e6, datasheet_flops=1e10, measured_flops=0.5e10)


def test_the_first_step_is_in_no_figure() -> None:
    meter = ThroughputMeter(GPU)
    first = meter.observe(step(1, seconds=60.0))
    assert (first.items_per_s, first.mfu, first.peak_share, first.eta_s) == (None, None, None, None)
    second = meter.observe(step(2))
    assert second.items_per_s == pytest.approx(10_000)
    assert second.eta_s == pytest.approx(198 * 0.1)


def test_shares_are_of_all_devices() -> None:
    meter = ThroughputMeter(GPU)
    meter.observe(step(1))
    reading = meter.observe(step(2))
    assert reading.mfu == pytest.approx(10_000 * 1e6 / (2 * 1e10))
    assert reading.peak_share == pytest.approx(10_000 * 1e6 / (2 * 0.5e10))


@pytest.mark.parametrize(
    "started", [replace(GPU, flops_per_item=0.0), replace(GPU, datasheet_flops=None, measured_flops=None)]
)
def test_what_is_not_known_is_none(started: RunStarted) -> None:
    shares = efficiency(started, 1000.0)
    assert (shares.mfu, shares.peak_share) == (None, None)


def test_throughput_follows_the_latest_steps_and_forgets_old_ones() -> None:
    meter = ThroughputMeter(GPU)
    for number in range(1, 101):
        meter.observe(step(number, seconds=0.1))
    for number in range(101, 116):
        reading = meter.observe(step(number, seconds=1.0))
    assert reading.items_per_s == pytest.approx(1000)


@given(st.lists(st.floats(0.001, 20.0), min_size=2, max_size=60))
def test_throughput_is_that_of_some_latest_steps(seconds: list[float]) -> None:
    meter = ThroughputMeter(GPU)
    for number, each_s in enumerate(seconds, start=1):
        reading = meter.observe(step(number, seconds=each_s))
    counted = seconds[1:]
    candidates = [1000 * n / sum(counted[-n:]) for n in range(1, len(counted) + 1)]
    assert reading.items_per_s is not None
    assert any(reading.items_per_s == pytest.approx(candidate, rel=1e-6) for candidate in candidates)


def test_a_resumed_run_counts_what_is_left() -> None:
    meter = ThroughputMeter(replace(GPU, first_step=150))
    meter.observe(step(151, seconds=9.0))
    assert meter.observe(step(152)).eta_s == pytest.approx(48 * 0.1)


def test_evaluation_slows_the_time_to_go_but_not_the_throughput() -> None:
    meter = ThroughputMeter(GPU)
    for number in range(1, 11):
        meter.observe(step(number))
    meter.pause(1.1)
    reading = meter.observe(step(11))
    assert reading.items_per_s == pytest.approx(10_000)
    assert reading.eta_s == pytest.approx(189 * (0.1 + 0.1))


def test_nothing_is_left_after_the_last_step() -> None:
    meter = ThroughputMeter(replace(GPU, last_step=1))
    assert meter.observe(step(1)).eta_s == 0.0


def test_a_fault_leaves_speed_and_time_to_go_as_they_were() -> None:
    meter = ThroughputMeter(GPU)
    for number in range(1, 21):
        meter.observe(step(number, seconds=0.1))
    meter.start_generation(replace(GPU, generation=1, first_step=18))
    first = meter.observe(step(19, seconds=9.0))
    assert first.items_per_s == pytest.approx(10_000), "a process's first step is in no figure"
    assert first.eta_s == pytest.approx(181 * 0.1)
    assert meter.observe(step(20, seconds=0.1)).items_per_s == pytest.approx(10_000)


def test_on_fewer_workers_speed_is_measured_anew() -> None:
    meter = ThroughputMeter(GPU)
    for number in range(1, 21):
        meter.observe(step(number, seconds=0.1))
    meter.start_generation(replace(GPU, generation=1, first_step=18, world_size=1))
    assert meter.observe(step(19, seconds=9.0)).items_per_s is None
    reading = meter.observe(step(20, seconds=0.2))
    assert reading.items_per_s == pytest.approx(5_000)
    assert reading.mfu == pytest.approx(5_000 * 1e6 / 1e10)


def test_hfu_counts_what_is_recomputed() -> None:
    shares = efficiency(replace(GPU, hardware_flops_per_item=4e6 / 3), 1000.0)
    assert shares.mfu is not None
    assert shares.hfu == pytest.approx(shares.mfu * 4 / 3)
    for same in (0.0, GPU.flops_per_item):  # not known, or nothing is recomputed
        assert efficiency(replace(GPU, hardware_flops_per_item=same), 1000.0).hfu is None


def test_the_remaining_time_covers_what_comes_in_nine_of_ten_runs() -> None:
    draw = random.Random(3)
    covered, num_runs = 0, 400
    for _ in range(num_runs):
        meter = ThroughputMeter(replace(GPU, last_step=300))
        for number in range(1, 101):
            reading = meter.observe(step(number, seconds=draw.uniform(0.05, 0.15)))
        rest = sum(draw.uniform(0.05, 0.15) for _ in range(200))
        assert reading.eta_s is not None
        assert reading.eta_error_s is not None
        covered += abs(rest - reading.eta_s) <= reading.eta_error_s
    assert 0.84 < covered / num_runs < 0.95


def test_faults_so_far_are_expected_again() -> None:
    def reading(num_faults: int) -> MeterReading:
        meter = ThroughputMeter(GPU)
        for number in range(1, 101):
            last = meter.observe(step(number, seconds=1.0))
            if number % 25 == 0 and number // 25 <= num_faults:
                meter.lose(5.0)
        return last

    calm, struck = reading(0), reading(3)
    assert calm.eta_s == pytest.approx(100)
    assert calm.eta_error_s == pytest.approx(0, abs=1e-5)
    assert struck.eta_s == pytest.approx(100 * (1 + 3 * 5 / 100))
    assert struck.eta_error_s == pytest.approx(1.645 * 5 * math.sqrt(3 + 3**2 / 3))


def test_counted_flops_make_mfu_and_outlive_a_generation() -> None:
    unknown = replace(GPU, flops_per_item=0.0)
    meter = ThroughputMeter(unknown)
    meter.observe(step(1, seconds=1.0))
    assert meter.observe(step(2, seconds=1.0)).mfu is None
    meter.note_flops(FlopsCounted(1e6, 4e6 / 3))
    expected = efficiency(replace(GPU, hardware_flops_per_item=4e6 / 3), 1000.0)
    reading = meter.observe(step(3, seconds=1.0))
    assert (reading.mfu, reading.hfu) == (expected.mfu, expected.hfu)
    assert expected.mfu
    meter.start_generation(replace(unknown, generation=1))
    assert meter.observe(step(4, seconds=9.0)).mfu == expected.mfu

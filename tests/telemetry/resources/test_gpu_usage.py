"""What NVML says of a real GPU; without one, or without its package, there is nothing."""

from __future__ import annotations

import time

import pytest
import torch

from closeranks.telemetry.device import device_uuid
from closeranks.telemetry.resources.gpu_usage import GpuUsage, throttle_words
from closeranks.telemetry.resources.reading import used_between


def test_reasons_are_words_and_idleness_is_none() -> None:
    assert throttle_words(0x1) == ()
    assert throttle_words(0x4 | 0x40) == ("power cap", "temperature (hardware)")


def test_a_device_that_nobody_knows_has_no_figures() -> None:
    assert not GpuUsage("GPU-00000000-0000-0000-0000-000000000000").open()


@pytest.mark.gpu
def test_a_busy_gpu_is_seen_to_be_busy() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = GpuUsage(device_uuid(device))
    assert gpu.open()
    before, at = gpu.read(), time.monotonic()
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    batch, num_copied = torch.empty(1 << 28, dtype=torch.uint8).pin_memory(), 4
    for _ in range(num_copied):
        batch.to(device)
    while time.monotonic() - at < 2:
        x = (x @ x).clamp_(-1, 1)
        torch.cuda.synchronize()
    after = gpu.read()
    used = used_between(before, after, time.monotonic() - at)
    gpu.close()
    print(used, after.words)
    if "pcie_received_bytes" in used:
        assert num_copied * batch.nbytes < used["pcie_received_bytes"] < 2 * num_copied * batch.nbytes
    assert used["utilization"] > 0.5
    assert 0 < used["sm_clock_mhz"] <= used["sm_clock_max_mhz"]
    assert 20 < used["temperature_c"] < 110
    assert used["energy_j"] > 50
    assert used["power_w"] <= 1.2 * used["power_limit_w"]

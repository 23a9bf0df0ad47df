import time

import pytest
import torch
from torch import nn

from closeranks.telemetry import device as devices
from closeranks.telemetry.device import (
    cpu_model,
    device_name,
    explain_out_of_memory,
    is_out_of_memory,
    measure_matmul_flops,
    memory_use,
    peak_memory_bytes,
    pick_size,
    requested_bytes,
)
from tests.cost import python_calls

CPU = torch.device("cpu")
HOST_ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_matmul_peak_is_a_plausible_figure(dtype: torch.dtype) -> None:
    assert 1e6 < measure_matmul_flops(CPU, dtype) < 1e15  # without instructions for bf16 a core reaches 6e7


def test_measuring_is_quick_and_leaves_the_random_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seconds = []
    for _ in range(3):
        began_at = time.process_time()
        measure_matmul_flops(CPU, torch.float32)
        seconds.append(time.process_time() - began_at)
    assert torch.equal(torch.rand(3), expected)
    assert min(seconds) < 0.3


def test_the_size_follows_the_speed() -> None:
    sizes = (1024, 512, 256)
    assert pick_size(sizes, 1e15) == 1024
    assert pick_size(sizes, 2 * 512**3 * 5 / 0.09) == 512
    assert pick_size(sizes, 1.0) == 256


def test_a_slow_device_is_measured_once_not_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def slow(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
        calls.append(left.shape[0])
        return 10.0

    monkeypatch.setattr(devices, "_timed_on_host", slow)
    assert measure_matmul_flops(CPU, torch.float32) == pytest.approx(2 * 256**3 / 10)
    assert calls == [256] * 4


def test_a_cpu_is_called_by_its_model_name() -> None:
    text = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) CPU   @ 2.20GHz\nmodel name\t: other\n"
    assert cpu_model(text) == "Intel Xeon CPU @ 2.20GHz"
    assert cpu_model("BogoMIPS : 50\n") == ""
    assert device_name(CPU)
    assert device_name(torch.device("meta")) == "meta"


def test_the_resident_set_grows_with_what_is_held() -> None:
    before = peak_memory_bytes(CPU)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_bytes(CPU) - before > (48 << 20)
    assert held.sum() == 64 << 20


def test_asking_for_the_resident_set_is_cheap() -> None:
    assert python_calls(lambda: peak_memory_bytes(CPU)) < 250, "some 50"


def test_running_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(str(caught.value)) == 4 << 50
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(KeyError("CUDA out of memory"))


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        ("Tried to allocate 2.50 GiB. GPU 0 has", 2.5 * 2**30),
        ("Tried to allocate 20.00 MiB", 20 << 20),
        (HOST_ERROR, 4096),
        ("no", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_message(message: str, num_bytes: float) -> None:
    assert requested_bytes(message) == num_bytes


def test_memory_is_counted_by_what_holds_it() -> None:
    module = nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 10, bias=False))
    module[0].weight.grad = torch.zeros(50, 100)
    remembered = [torch.zeros(50, 100), torch.zeros(1), torch.empty(9, device="meta")]
    use = memory_use(module, remembered, CPU, RuntimeError(HOST_ERROR))
    assert use.parameters_bytes == 4 * (5000 + 500)
    assert use.gradients_bytes == 4 * 5000
    assert use.optimizer_bytes == 4 * 5000 + 4
    assert use.requested_bytes == 4096
    assert use.total_bytes > use.in_use_bytes > 0
    text = explain_out_of_memory(module, remembered, CPU, RuntimeError(HOST_ERROR), is_mixed=False)
    assert "Largest parameters: 0.weight (19.5 KiB), 1.weight (2.0 KiB)." in text
    assert "train.micro_batch" in text


@pytest.mark.gpu
def test_on_an_accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = torch.device("cuda", 0)
    assert device_name(cuda) == torch.cuda.get_device_name(0)
    measure_matmul_flops(cuda, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        began_at = time.perf_counter()
        assert 1e11 < measure_matmul_flops(cuda, dtype) < 1e16
        assert time.perf_counter() - began_at < 1.0
    assert peak_memory_bytes(cuda) < 128 << 20, "what is left is the matmul library's workspace"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, device=cuda)
    assert is_out_of_memory(caught.value)
    module = nn.Linear(1000, 1000, device=cuda)
    assert "ran out of memory" in explain_out_of_memory(module, (), cuda, caught.value, is_mixed=True)
    assert memory_use(module, (), cuda, caught.value).requested_bytes == 4 << 45

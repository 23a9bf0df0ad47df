"""Our matrix product against ``nn.Linear``: the same values, and on CUDA under autocast a finer weight gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from closeranks.models.llama.linear import Linear


def pair(device: str) -> tuple[nn.Linear, Linear]:
    torch.manual_seed(0)
    plain, ours = nn.Linear(64, 48, bias=False, device=device), Linear(64, 48).to(device)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def gradients(layer: nn.Linear, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = input.clone().requires_grad_()
    with torch.autocast(input.device.type, dtype=torch.bfloat16):
        output = layer(x)
    output.square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return output.detach(), x.grad, layer.weight.grad


def test_on_the_cpu_it_is_nn_linear() -> None:
    plain, ours = pair("cpu")
    x = torch.randn(3, 10, 64)
    for left, right in zip(gradients(plain, x), gradients(ours, x), strict=True):
        assert torch.equal(left, right)
    assert list(ours.state_dict()) == ["weight"]


@pytest.mark.gpu
def test_on_cuda_the_weight_gradient_is_closer_to_the_truth() -> None:
    plain, ours = pair("cuda")
    x = torch.randn(3, 1000, 64, device="cuda")
    theirs, mine = gradients(plain, x), gradients(ours, x)
    assert torch.equal(theirs[0], mine[0])
    assert torch.equal(theirs[1], mine[1])
    assert mine[2].dtype == torch.float32
    rows = (2 * theirs[0]).double().reshape(-1, 48)
    truth = rows.t() @ x.bfloat16().double().reshape(-1, 64)
    error = [((g.double() - truth).norm() / truth.norm()).item() for g in (theirs[2], mine[2])]
    assert error[1] < 1e-5 < error[0]


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_gathered_sequence_is_multiplied_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strides are odd where the batch is 1; a batched product would not be kept by selective recompute."""
    monkeypatch.setattr(Linear, "runs_as_on_cuda", True)
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16), _Operations() as seen:
        gathered = torch.empty(2 * 1 * 8 * 64).as_strided((1, 16, 64), (512, 64, 1)).requires_grad_()
        output = Linear(64, 48)(gathered)
    assert output.shape == (1, 16, 48)
    assert "mm" in seen.names
    assert "bmm" not in seen.names

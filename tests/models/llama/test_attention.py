"""Grouped-query attention: every kernel of this machine, with and without shared heads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from closeranks.models.llama import attention
from closeranks.models.llama.attention import attend


def heads(num_heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_heads, 7, 8, dtype=torch.float64, generator=generator)


def by_hand(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    num_shared = queries.shape[1] // keys.shape[1]
    mixed = torch.zeros_like(queries)
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[:, head // num_shared].transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
        mixed[:, head] = scores.softmax(dim=-1) @ values[:, head // num_shared]
    return mixed


@pytest.mark.parametrize("choice", ["auto", "flash", "math"])
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_kernels_agree_with_the_definition(choice: str, num_kv_heads: int) -> None:
    inputs = heads(6, 0), heads(num_kv_heads, 1), heads(num_kv_heads, 2)
    torch.testing.assert_close(attend(*inputs, choice), by_hand(*inputs), rtol=1e-12, atol=1e-12)


def test_the_choice_ends_with_the_call() -> None:
    before = torch._C._get_sdp_priority_order()
    attend(heads(2, 0), heads(2, 1), heads(2, 2), "math")
    assert torch._C._get_sdp_priority_order() == before
    assert torch.backends.cuda.flash_sdp_enabled()


# Dynamo touches .grad of non-leaf tensors while it traces, and hides the warning only where warnings are not errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_order_of_preference_is_traced_and_restored() -> None:
    """What a compiled block on CUDA does, traced here with the CPU's kernels at the end of the list."""
    torch._dynamo.reset()
    before = torch._C._get_sdp_priority_order()

    def preferring(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(attention._BACKENDS["auto"], set_priority=True):
            return attention._attend(queries, keys, values)

    inputs = heads(6, 0).requires_grad_(), heads(3, 1), heads(3, 2)
    mixed = torch.compile(preferring, backend="aot_eager", fullgraph=True)(*inputs)
    mixed.sum().backward()
    torch.testing.assert_close(mixed, by_hand(*inputs), rtol=1e-12, atol=1e-12)
    assert torch._C._get_sdp_priority_order() == before


def test_auto_prefers_cudnn_and_can_always_fall_back() -> None:
    order = attention._BACKENDS["auto"]
    assert order[0] == SDPBackend.CUDNN_ATTENTION
    assert order[-1] == SDPBackend.MATH
    assert len(set(order)) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_cuda_kernels_agree_with_the_definition(dtype: torch.dtype, num_kv_heads: int) -> None:
    inputs = [
        torch.randn(2, n, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (8, *[num_kv_heads] * 2)
    ]
    mixed = attend(*inputs, "auto")
    mixed.float().square().sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = attend(*wide, "math")
    expected.square().sum().backward()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(mixed.double(), expected, rtol=tolerance, atol=tolerance)
    for found, exact in zip(inputs, wide, strict=True):
        assert found.grad is not None
        assert exact.grad is not None
        error = (found.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < tolerance

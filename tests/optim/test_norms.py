from __future__ import annotations

import pytest
import torch

from closeranks.optim.norms import norm_squared


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
)
def test_is_the_sum_of_squares(dtype: torch.dtype, tolerance: float) -> None:
    gradients = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((7, 5), (3,), (1,), (2, 3, 4))]
    found = norm_squared(gradients)
    assert (found.shape, found.dtype) == ((), torch.float64)
    assert found.item() == pytest.approx(sum(g.double().square().sum().item() for g in gradients), rel=tolerance)


def test_mixed_types_and_layouts() -> None:
    gradients = [torch.randn(4, 6).t(), torch.randn(3, dtype=torch.float64), torch.randn(5).bfloat16(), torch.randn(2)]
    assert norm_squared(gradients).item() == pytest.approx(sum(g.double().square().sum().item() for g in gradients))


def test_half_precision_does_not_overflow() -> None:
    assert norm_squared([torch.full((10,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(
        10 * 59999.0**2, rel=1e-3
    )


def test_a_large_tensor_costs_no_precision() -> None:
    """Each piece's norm is a float32 sum per vector lane: 1.2e-6 off at most with lanes of four (200 draws)."""
    gradient = torch.randn(4_000_000)
    exact = gradient.double().square().sum().item()
    assert norm_squared([gradient]).item() == pytest.approx(exact, rel=4e-6)
    assert torch.linalg.vector_norm(gradient).item() ** 2 != pytest.approx(exact, rel=4e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    gradients = [torch.zeros(100_000, dtype=dtype), torch.ones(3)]
    gradients[0][70_001] = bad
    assert not torch.isfinite(norm_squared(gradients))


def test_nothing_has_norm_zero() -> None:
    assert norm_squared([]).item() == 0.0
    assert norm_squared([torch.zeros(0)]).item() == 0.0
    assert norm_squared([], torch.device("meta")).device.type == "meta"

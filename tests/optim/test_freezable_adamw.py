"""AdamW whose second moments stand still, against the rule written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from closeranks.optim.config import OptimConfig, ScheduleConfig
from closeranks.optim.optimizer import Optimizer, freeze, whole_parameters

CONFIG = OptimConfig(lr=0.02, weight_decay=0.1, schedule=ScheduleConfig(name="constant", warmup=0))
FROZEN_FROM = 3


def gradient(step: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(step))


def trained(dtype: torch.dtype, num_steps: int, skipped: int = -1) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(5, 3).to(dtype)
    chosen = freeze(module, CONFIG)
    optimizer = Optimizer(whole_parameters(module), chosen, CONFIG, num_steps=10, frozen_from=FROZEN_FROM)
    for step in range(num_steps):
        for parameter in module.parameters():
            parameter.grad = gradient(step, parameter) * (torch.nan if step == skipped else 1.0)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        ok = torch.tensor(0.0 if step == skipped else 1.0)
        optimizer.step(step, gradients, torch.tensor(0.5, dtype=torch.float64), ok)
    return module, optimizer


def by_hand(num_steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(5, 3).double()
    found = []
    (b1, b2), eps = CONFIG.betas, CONFIG.eps
    for parameter in module.parameters():
        p, m, v = parameter.detach().clone(), torch.zeros_like(parameter), torch.zeros_like(parameter)
        for step in range(num_steps):
            g = gradient(step, p) * 0.5
            count = min(step + 1, FROZEN_FROM)
            m = b1 * m + (1 - b1) * g
            if step < FROZEN_FROM:
                v = b2 * v + (1 - b2) * g * g
            if p.ndim > 1:
                p = p - CONFIG.lr * CONFIG.weight_decay * p
            root = (v / (1 - b2**count)).sqrt()
            if step >= FROZEN_FROM:
                root = root.clamp(min=root.mean().item())
            p = p - CONFIG.lr * (m / (1 - b1**count)) / (root + eps)
        found.append(p)
    return found


def test_it_is_adamw_until_then_and_the_rule_afterwards() -> None:
    for num_steps in (FROZEN_FROM, 8):
        module, _ = trained(torch.float64, num_steps)
        for parameter, expected in zip(module.parameters(), by_hand(num_steps), strict=True):
            torch.testing.assert_close(parameter.detach(), expected.detach(), rtol=1e-10, atol=1e-12)


def test_float32_folds_the_factor_into_the_same() -> None:
    module, _ = trained(torch.float32, 8)
    torch.manual_seed(0)
    for parameter in module.parameters():
        assert parameter.isfinite().all()
    ours = trained(torch.float32, 8)[0].state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in module.state_dict().items())


def test_second_moments_and_the_counter_stand_still() -> None:
    then, now = (trained(torch.float64, steps)[1] for steps in (FROZEN_FROM, 8))
    for (_, key, before), (_, _, after) in zip(then.state_tensors(), now.state_tensors(), strict=True):
        assert torch.equal(before, after) == (key != "exp_avg"), key


def test_a_skipped_step_changes_nothing() -> None:
    before, first = trained(torch.float32, 5)
    after, second = trained(torch.float32, 6, skipped=5)
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one, other)
    for (_, key, one), (_, _, other) in zip(first.state_tensors(), second.state_tensors(), strict=True):
        assert torch.equal(one, other), key


def one_weight(gradients: list[float], skipped: set[int]) -> float:
    """What becomes of a weight of 1 whose moments freeze after two steps."""
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    config = CONFIG.model_copy(update={"weight_decay": 0.0})
    optimizer = Optimizer(whole_parameters(module), freeze(module, config), config, num_steps=10, frozen_from=2)
    for step, value in enumerate(gradients):
        module.weight.grad = torch.full((1, 1), value, dtype=torch.float64)
        ok = torch.tensor(0.0 if step in skipped else 1.0)
        optimizer.step(step, [module.weight.grad], torch.tensor(1.0, dtype=torch.float64), ok)
    return module.weight.item()


def test_a_quiet_weight_is_not_thrown_about_by_its_neighbours_signs() -> None:
    """Signs give all of a block one size: a weight a million times quieter than the rest still moves at their pace."""
    module = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(module.weight)
    config = CONFIG.model_copy(update={"weight_decay": 0.0})
    optimizer = Optimizer(whole_parameters(module), freeze(module, config), config, num_steps=10, frozen_from=2)
    sizes = torch.ones(1, 64)
    sizes[0, 0], sizes[0, 1] = 1e-6, 0.0
    for step in range(4):
        module.weight.grad = sizes.clone() if step < 2 else torch.ones(1, 64)
        optimizer.step(step, [module.weight.grad], torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0))
    moved = module.weight.abs().flatten()
    assert moved[0] <= moved[2] < 10 * CONFIG.lr
    assert moved[1] == 0.0, "what never had a gradient is not known, and lowers nobody's floor"


def test_what_had_no_gradient_until_then_stays() -> None:
    """Its size is not known, and signs that travel are never zero."""
    assert one_weight([0.0, 0.0, 1e-3, -1e-3], set()) == 1.0
    assert one_weight([1e-3, 0.0, 1e-3, 1e-3], set()) != 1.0, "one gradient is enough"


def test_moments_that_never_were_move_nothing() -> None:
    assert one_weight([1e-3] * 4, {0, 1}) == 1.0

"""LARS and LAMB against the published rules, written down here once more, one parameter after the other in float64."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ParameterShard
from closeranks.optim.config import GroupConfig, OptimConfig
from closeranks.optim.norms import norms_squared
from closeranks.optim.optimizer import Optimizer, freeze, whole_parameters
from tests.optim.test_optimizer import (
    ONE,
    Model,
    assert_skipped_steps_leave_no_trace,
    build,
    config,
    cut,
    everything,
    fill,
    model,
    restore,
)

ADAPTED = {"embed.weight", "mid.weight"}


class PlainLars:
    """You, Gitman, Ginsburg 2017, algorithm 1."""

    def __init__(self, lr: float, decay: float, momentum: float, eta: float) -> None:
        self.lr, self.decay, self.momentum, self.eta = lr, decay, momentum, eta
        self.v: dict[str, Tensor] = {}

    def step(self, name: str, w: Tensor, g: Tensor) -> None:
        rate, decay = self.lr, 0.0
        if name in ADAPTED:
            decay = self.decay
            w_norm, g_norm = float(w.square().sum() ** 0.5), float(g.square().sum() ** 0.5)
            if w_norm > 0 and g_norm > 0:
                rate = self.lr * self.eta * w_norm / (g_norm + decay * w_norm)
        v = self.momentum * self.v.get(name, torch.zeros_like(w)) + rate * (g + decay * w)
        self.v[name] = v
        w -= v


class PlainLamb:
    """You et al. 2019, algorithm 2, with the bias correction of its appendix."""

    def __init__(self, lr: float, decay: float, betas: tuple[float, float], eps: float) -> None:
        self.lr, self.decay, self.betas, self.eps = lr, decay, betas, eps
        self.seen: dict[str, tuple[Tensor, Tensor, int]] = {}

    def step(self, name: str, w: Tensor, g: Tensor) -> None:
        m, v, t = self.seen.get(name, (torch.zeros_like(w), torch.zeros_like(w), 0))
        b1, b2 = self.betas
        m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, t + 1
        self.seen[name] = m, v, t
        r = (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + self.eps)
        ratio = 1.0
        if name in ADAPTED:
            r = r + self.decay * w
            w_norm, r_norm = float(w.square().sum() ** 0.5), float(r.square().sum() ** 0.5)
            ratio = w_norm / r_norm if w_norm > 0 and r_norm > 0 else 1.0
        w -= self.lr * ratio * r


def plain(keys: dict[str, Any]) -> PlainLars | PlainLamb:
    if keys["name"] == "lars":
        return PlainLars(0.01, 0.2, keys.get("momentum", 0.9), keys.get("trust", 0.001))
    return PlainLamb(0.01, 0.2, keys.get("betas", (0.9, 0.95)), keys.get("eps", 1e-8))


RULES: list[dict[str, Any]] = [
    {"name": "lars"},
    {"name": "lars", "momentum": 0.0, "trust": 0.5},
    {"name": "lamb"},
    {"name": "lamb", "betas": (0.8, 0.99), "eps": 1e-4},
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("keys", RULES)
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_agrees_with_the_published_rule(
    dtype: torch.dtype, tolerance: float, keys: dict[str, Any], factor: float
) -> None:
    module, reference = model(dtype), plain(keys)
    weights = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    optimizer = build(module, config(weight_decay=0.2, **keys), num_steps=6)
    for step in range(6):
        gradients = fill(module, step)
        for (name, w), gradient in zip(weights.items(), gradients, strict=True):
            reference.step(name, w, factor * gradient.double())
        optimizer.step(step, gradients, torch.tensor(factor, dtype=torch.float64), ONE)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keys", RULES)
def test_a_norm_of_zero_keeps_the_ratio_one(keys: dict[str, Any]) -> None:
    """Weights that start at zero leave it, and a gradient of zero divides nothing."""
    module, reference = model(torch.float64), plain(keys)
    with torch.no_grad():
        module.mid.weight.zero_()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build(module, config(weight_decay=0.2, **keys), num_steps=3)
    for step in range(3):
        gradients = fill(module, step)
        gradients[0].zero_()
        for (name, w), gradient in zip(weights.items(), gradients, strict=True):
            reference.step(name, w, gradient)
        optimizer.step(step, gradients, ONE, ONE)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-12)
    assert module.mid.weight.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keys", RULES)
def test_a_skipped_step_changes_nothing(dtype: torch.dtype, keys: dict[str, Any]) -> None:
    module, untouched = model(dtype), model(dtype)
    with torch.no_grad():  # a sign of zero is a bit too
        for one in (module, untouched):
            one.mid.bias.fill_(-0.0)
    optimizer, other = (build(m, config(**keys), num_steps=9) for m in (module, untouched))

    assert_skipped_steps_leave_no_trace((module, optimizer), (untouched, other))


@pytest.mark.parametrize("keys", RULES)
def test_a_restored_run_goes_on_bit_for_bit(keys: dict[str, Any]) -> None:
    first, second = model(), model()
    optimizer, restored = (build(m, config(**keys), num_steps=9) for m in (first, second))
    for step in range(3):
        optimizer.step(step, fill(first, step), ONE, ONE)
    second.load_state_dict(first.state_dict())
    restore(restored, optimizer)
    for step in range(3, 6):
        optimizer.step(step, fill(first, step), ONE, ONE)
        restored.step(step, fill(second, step), ONE, ONE)
    assert everything(second, restored) == everything(first, optimizer)


class Table:
    """Ranks as threads that meet to add their vectors up, and count how often they do."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=120)
        self._lock = threading.Lock()
        self._sums: list[Tensor] = []
        self.sizes: list[int] = []

    def total(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self._sums.append(tensor.clone())
            self.sizes.append(tensor.numel())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._sums).sum(0))
        if self._barrier.wait() == 0:
            self._sums.clear()
        self._barrier.wait()
        return tensor


def stepped(optimizers: list[Optimizer], gradients: list[list[Tensor]], step: int) -> None:
    threads = [
        threading.Thread(target=optimizer.step, args=(step, own, ONE, ONE))
        for optimizer, own in zip(optimizers, gradients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("keys", RULES)
def test_slices_are_updated_as_the_whole_is_with_one_small_sum(keys: dict[str, Any]) -> None:
    """Three ranks: two hold a half of everything each, and the third the second half once more, without a voice."""
    wanted = config(weight_decay=0.3, **keys)
    whole, sharded, copied, drawn = (model(torch.float64) for _ in range(4))
    reference = build(whole, wanted, num_steps=4)
    echo = tuple(ParameterShard(leaf.tensor, leaf.piece, is_primary=False) for leaf in cut(copied, 1))
    ranks, table = [cut(sharded, 0), cut(sharded, 1), echo], Table(3)
    assignment = freeze(sharded, wanted)
    optimizers = [Optimizer(leaves, assignment, wanted, num_steps=4, total=table.total) for leaves in ranks]
    for step in range(4):
        gradients = fill(whole, step)
        with torch.no_grad():
            for parameter, gradient in zip(drawn.parameters(), gradients, strict=True):
                parameter.copy_(gradient)
        reference.step(step, gradients, ONE, ONE)
        for number, leaves in enumerate(ranks):
            for leaf, share in zip(leaves, cut(drawn, min(number, 1)), strict=True):
                leaf.tensor.grad = share.tensor.clone()
        stepped(optimizers, [[leaf.tensor.grad for leaf in leaves] for leaves in ranks], step)  # type: ignore[misc]
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for own, same in zip(ranks[1], echo, strict=True):
        assert torch.equal(own.tensor, same.tensor)
    assert table.sizes == [2 * (5 + 1)] * 3 * 4, "one sum in a step, of two values for each parameter"


def test_a_rank_may_hold_nothing_and_still_meets_the_others() -> None:
    wanted, table = config(name="lamb"), Table(2)
    module = model()
    assignment = freeze(module, wanted)
    leaves = whole_parameters(module)
    optimizers = [Optimizer(own, assignment, wanted, num_steps=1, total=table.total) for own in (leaves, ())]
    stepped(optimizers, [fill(module, 0), []], 0)
    alone = model()
    build(alone, wanted, num_steps=1).step(0, fill(alone, 0), ONE, ONE)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), alone.parameters(), strict=True))


def test_groups_have_their_own_rate_and_decay() -> None:
    groups = (GroupConfig(pattern="mid.weight", lr_scale=0.0), GroupConfig(pattern="norm.*", lr_scale=2.0))
    module, usual = model(torch.float64), model(torch.float64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    build(module, config(name="lamb", groups=groups), num_steps=1).step(0, fill(module, 0), ONE, ONE)
    build(usual, config(name="lamb"), num_steps=1).step(0, fill(usual, 0), ONE, ONE)
    moved = {name: p.detach() - before[name] for name, p in module.named_parameters()}
    expected = {name: p.detach() - before[name] for name, p in usual.named_parameters()}
    assert not moved["mid.weight"].any()
    torch.testing.assert_close(moved["norm.weight"], 2 * expected["norm.weight"])
    torch.testing.assert_close(moved["embed.weight"], expected["embed.weight"])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_memory_in_another_order_gives_the_same(name: Any) -> None:
    """Channels last, as convolutions are often kept."""
    plain_one, other = (nn.Conv2d(3, 5, 3).double() for _ in range(2))
    other.load_state_dict(plain_one.state_dict())
    other.to(memory_format=torch.channels_last)
    wanted = config(name=name)
    optimizers = [build(m, wanted, num_steps=3) for m in (plain_one, other)]
    for step in range(3):
        for module, optimizer in zip((plain_one, other), optimizers, strict=True):
            optimizer.step(step, fill(module, step), ONE, ONE)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain_one.weight, other.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"lars and lamb cannot.*Keep the parameters in float32"):
        build(model(dtype), config(name="lamb"), num_steps=3)


def test_types_may_be_mixed() -> None:
    module = Model()
    module.mid.double()
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = Optimizer(
        whole_parameters(module), freeze(module, OptimConfig()), OptimConfig(name="lamb", lr=0.1), num_steps=3
    )
    optimizer.step(2, fill(module, 0), ONE, ONE)
    assert all(not torch.equal(one, p) for one, p in zip(before, module.parameters(), strict=True))


def test_large_tensors_keep_their_precision() -> None:
    """One float32 sum over 25 million values would be 0.3% off. Processors with shorter vectors round more often."""
    large, small = torch.full((12_000_001,), 0.1), torch.full((7,), 2.0)
    found = norms_squared([large, small])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([12_000_001 * 0.1**2, 28.0], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_on_the_gpu_as_on_the_cpu_without_a_host_sync(
    keys: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    here, there = model(dtype), model(dtype).cuda()
    cpu, gpu = (build(m, config(**keys), num_steps=9) for m in (here, there))
    scalars = [(torch.tensor(0.5), torch.tensor(float(ok))) for ok in (0, 1, 0, 1, 1)]
    on_gpu = [(factor.cuda(), ok.cuda()) for factor, ok in scalars]
    for step, (factor, ok) in enumerate(scalars):
        cpu.step(step, fill(here, step), factor, ok)
        gradients = fill(there, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gpu.step(step, gradients, *on_gpu[step])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(one, other.cpu(), rtol=tolerance, atol=tolerance)

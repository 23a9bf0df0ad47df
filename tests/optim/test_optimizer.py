from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ConfigError, ModelError
from closeranks.core.protocols import ParameterShard
from closeranks.optim.config import GroupConfig, OptimConfig, ScheduleConfig
from closeranks.optim.optimizer import Optimizer, freeze, parameter_facts, whole_parameters

ONE = torch.tensor(1.0)
ZERO = torch.tensor(0.0)
FLAT = ScheduleConfig(name="constant", warmup=0)


class Model(nn.Module):
    """A tied pair, a norm, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def fill(module: nn.Module, step: int) -> list[Tensor]:
    """The same gradients for the same step, whatever the module's history."""
    torch.manual_seed(100 + step)
    gradients = []
    for parameter in module.parameters():
        parameter.grad = (
            torch.randn(parameter.shape, dtype=torch.float64).to(parameter) if parameter.requires_grad else None
        )
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return gradients


def config(**keys: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 0.01, "schedule": FLAT, **keys})


def build(module: nn.Module, config: OptimConfig, *, num_steps: int) -> Optimizer:
    return Optimizer(whole_parameters(module), freeze(module, config), config, num_steps=num_steps)


def bits(value: Any) -> Any:
    """Everything, copied, in a form that compares bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {key: bits(item) for key, item in value.items()} if isinstance(value, dict) else value


def everything(module: nn.Module, optimizer: Optimizer) -> Any:
    return bits({**module.state_dict(), "optimizer": state_of(optimizer)})


def state_of(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What it remembers, by the names of whole parameters."""
    found: dict[str, dict[str, Tensor]] = {}
    for leaf, key, tensor in optimizer.state_tensors():
        found.setdefault(leaf.piece.name, {})[key] = tensor
    return found


def restore(optimizer: Optimizer, other: Optimizer) -> None:
    """As a run does it: what is remembered is filled in place, then the optimizer is told."""
    state = state_of(other)
    for leaf, key, tensor in optimizer.state_tensors():
        tensor.copy_(state[leaf.piece.name][key])
    optimizer.restored()


def plain(
    module: Model, rule: Callable[..., torch.optim.Optimizer], decay: float, **keys: Any
) -> torch.optim.Optimizer:
    matrices = [module.embed.weight, module.mid.weight]
    vectors = [module.mid.bias, module.norm.weight, module.norm.bias]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return rule(groups, foreach=False, **keys)


RULES: list[Any] = [
    ({"name": "adamw"}, torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    ({"name": "adamw", "betas": (0.8, 0.99), "eps": 1e-5}, torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-5}),
    ({"name": "sgd"}, torch.optim.SGD, {"momentum": 0.9}),
    ({"name": "sgd", "momentum": 0.0}, torch.optim.SGD, {}),
    ({"name": "sgd", "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("keys", "rule", "options"), RULES)
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_agrees_with_torchs_plain_optimizer(
    dtype: torch.dtype, tolerance: float, keys: dict[str, Any], rule: Any, options: dict[str, Any], factor: float
) -> None:
    ours, theirs = model(dtype), model(dtype)
    optimizer = build(ours, config(weight_decay=0.2, **keys), num_steps=5)
    reference = plain(theirs, rule, decay=0.2, lr=0.01, **options)
    for step in range(5):
        optimizer.step(step, fill(ours, step), torch.tensor(factor, dtype=torch.float64), ONE)
        for gradient in fill(theirs, step):
            gradient.mul_(factor)
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_flat_gradients_are_scaled_once(dtype: torch.dtype) -> None:
    """Buckets that the parameters' gradients are views of, as a reducer hands them over."""
    single, flat = model(dtype), model(dtype)
    optimizers = [build(m, config(name="sgd", momentum=0.0), num_steps=5) for m in (single, flat)]
    factor = torch.tensor(0.25, dtype=torch.float64)
    optimizers[0].step(0, fill(single, 0), factor, ONE)
    bucket = torch.cat([gradient.reshape(-1) for gradient in fill(flat, 0)])
    begin = 0
    for parameter in flat.parameters():
        parameter.grad = bucket[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    optimizers[1].step(0, [bucket], factor, ONE)
    assert bits(dict(single.state_dict())) == bits(dict(flat.state_dict()))
    assert bits(dict(flat.state_dict())) != bits(dict(model(dtype).state_dict()))


def assert_skipped_steps_leave_no_trace(
    skipping: tuple[nn.Module, Optimizer], untouched: tuple[nn.Module, Optimizer]
) -> None:
    """At the beginning, where there is nothing to remember yet, and between steps that are taken."""
    module, optimizer = skipping

    def skip(step: int) -> None:
        gradients = fill(module, step)
        gradients[0].fill_(float("nan"))
        gradients[1].fill_(float("inf"))
        before = everything(module, optimizer)
        optimizer.step(step, gradients, torch.tensor(float("nan")), ZERO)
        assert everything(module, optimizer) == before

    skip(0)
    skip(1)
    for step in (2, 3):
        optimizer.step(step, fill(module, step), ONE, ONE)
        untouched[1].step(step, fill(untouched[0], step), ONE, ONE)
        skip(step)
    assert everything(module, optimizer) == everything(*untouched)


# Half types with momentum are refused on the CPU: test_half_types_with_momentum_are_refused_on_the_cpu.
SKIPPABLE = [
    (dtype, *rule)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for rule in RULES
    if not (dtype == torch.bfloat16 and rule[2].get("momentum"))
]


@pytest.mark.parametrize(("dtype", "keys", "rule", "options"), SKIPPABLE)
def test_a_skipped_step_changes_nothing(dtype: torch.dtype, keys: dict[str, Any], rule: Any, options: Any) -> None:
    module, untouched = model(dtype), model(dtype)
    optimizer, other = (build(m, config(**keys), num_steps=9) for m in (module, untouched))

    assert_skipped_steps_leave_no_trace((module, optimizer), (untouched, other))


@pytest.mark.parametrize(("keys", "rule", "options"), RULES)
def test_a_restored_run_goes_on_bit_for_bit(keys: dict[str, Any], rule: Any, options: Any) -> None:
    first = model()
    optimizer = build(first, config(**keys), num_steps=9)
    for step in range(3):
        optimizer.step(step, fill(first, step), ONE, ONE)
    second = model()
    second.load_state_dict(first.state_dict())
    restored = build(second, config(**keys), num_steps=9)
    restore(restored, optimizer)
    assert everything(second, restored) == everything(first, optimizer)
    for step in range(3, 6):
        optimizer.step(step, fill(first, step), ONE, ONE)
        restored.step(step, fill(second, step), ONE, ONE)
    assert everything(second, restored) == everything(first, optimizer)


def test_state_is_there_before_the_first_step_and_holds_a_tied_parameter_once() -> None:
    state = state_of(build(model(), config(), num_steps=1))
    assert list(state) == ["embed.weight", "mid.weight", "mid.bias", "norm.weight", "norm.bias"]
    for memory in state.values():
        assert set(memory) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(not value.any() for value in memory.values())


def test_state_is_referenced() -> None:
    module = model()
    optimizer = build(module, config(), num_steps=9)
    held = state_of(optimizer)
    optimizer.step(0, fill(module, 0), ONE, ONE)
    assert held["mid.weight"]["step"].item() == 1.0


def test_frozen_parameters_have_no_gradient_no_state_and_do_not_move() -> None:
    module = model()
    frozen = config(groups=(GroupConfig(pattern="mid.*", frozen=True),))
    assert freeze(module, frozen).frozen == ("mid.weight", "mid.bias")
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["mid.weight", "mid.bias"]
    optimizer = build(module, frozen, num_steps=3)
    assert not [name for name in state_of(optimizer) if name.startswith("mid.")]
    before = bits(dict(module.state_dict()))
    optimizer.step(0, fill(module, 0), ONE, ONE)
    after = bits(dict(module.state_dict()))
    assert {name for name in after if after[name] == before[name]} == {"mid.weight", "mid.bias"}


def test_what_the_module_froze_itself_stays_frozen() -> None:
    module = model()
    module.embed.weight.requires_grad_(False)
    assert freeze(module, config()).frozen == ()
    optimizer = build(module, config(), num_steps=3)
    assert "embed.weight" not in state_of(optimizer)
    optimizer.step(0, fill(module, 0), ONE, ONE)


def test_nothing_left_to_train() -> None:
    with pytest.raises(ModelError, match=r"no parameter left to train.*Loosen the frozen patterns"):
        freeze(model(), config(groups=(GroupConfig(pattern="*", frozen=True),)))
    with pytest.raises(ModelError, match=r"no parameter left to train.*Give it trainable"):
        freeze(nn.ReLU(), config())


def test_a_pattern_misspelt() -> None:
    misspelt = config(groups=(GroupConfig(pattern="mid.weigt"),))
    with pytest.raises(ConfigError, match=r"'mid.weigt' matches no parameter. Did you mean 'mid.weight'"):
        freeze(model(), misspelt)


def test_groups_have_their_own_rate_and_decay() -> None:
    grouped = config(
        name="sgd", momentum=0.0, lr=0.5, weight_decay=0.0,
        groups=(GroupConfig(pattern="norm.*", lr_scale=0.1), GroupConfig(pattern="mid.*", weight_decay=0.4)),
    )  # fmt: skip
    module = model(torch.float64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build(module, grouped, num_steps=3)
    gradients = dict(zip(before, (g.clone() for g in fill(module, 0)), strict=True))
    optimizer.step(0, [p.grad for p in module.parameters() if p.grad is not None], ONE, ONE)
    for name, parameter in module.named_parameters():
        rate = 0.05 if name.startswith("norm.") else 0.5
        pull = 0.4 * before[name] if name.startswith("mid.") else 0.0
        torch.testing.assert_close(parameter.detach(), before[name] - rate * (gradients[name] + pull))


def test_the_rate_follows_the_schedule() -> None:
    course = config(
        name="sgd", momentum=0.0, weight_decay=0.0, lr=1.0, schedule=ScheduleConfig(name="linear", warmup=2)
    )
    module = nn.Linear(1, 1, bias=False)
    optimizer = build(module, course, num_steps=4)
    for step, rate in enumerate((0.5, 1.0, 1.0, 0.55)):
        before = module.weight.item()
        module.weight.grad = torch.ones(1, 1)
        optimizer.step(step, [module.weight.grad], ONE, ONE)
        assert before - module.weight.item() == pytest.approx(rate, rel=1e-5)
        assert optimizer.lr(step) == pytest.approx(rate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_with_momentum_are_refused_on_the_cpu(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"sgd with momentum cannot.*Keep the parameters in float32"):
        build(model(dtype), config(name="sgd"), num_steps=3)
    for fine in ({"name": "adamw"}, {"name": "sgd", "momentum": 0.0}):
        build(model(dtype), config(**fine), num_steps=3)


def test_facts_of_parameters() -> None:
    facts = parameter_facts(model())
    assert [one.name for one in facts] == [name for name, _ in model().named_parameters()]
    assert facts[0].aliases == ("head.weight",)
    assert facts[1].shape == (6, 6)


def test_a_parameter_without_gradient_stays() -> None:
    module = model()
    optimizer = build(module, config(), num_steps=3)
    gradients = fill(module, 0)
    module.norm.bias.grad = None
    before = module.norm.bias.detach().clone()
    optimizer.step(0, gradients, ONE, ONE)
    assert torch.equal(module.norm.bias, before)
    assert state_of(optimizer)["norm.bias"]["step"].item() == 0.0


def cut(module: Model, rank: int) -> tuple[ParameterShard, ...]:
    """A rank's half of every parameter: rows of the embedding, a range of elements of all others."""
    leaves = []
    for leaf in whole_parameters(module):
        by_rows = leaf.piece.name == "embed.weight"
        tensor = leaf.tensor.detach() if by_rows else leaf.tensor.detach().view(-1)
        half = len(tensor) // 2
        first, last = (0, half) if rank == 0 else (half, len(tensor))
        piece = leaf.piece.narrow(0, first, last) if by_rows else leaf.piece.flattened(first, last)
        leaves.append(ParameterShard(tensor[first:last], piece))
    return tuple(leaves)


@pytest.mark.parametrize("keys", [{"name": "adamw"}, {"name": "sgd"}])
def test_shards_are_updated_as_the_whole_is(keys: dict[str, Any]) -> None:
    """A vector that is a slice of a matrix decays, since the matrix does."""
    wanted = config(weight_decay=0.3, **keys)
    whole, sharded, gradients = model(torch.float64), model(torch.float64), model(torch.float64)
    reference = build(whole, wanted, num_steps=5)
    ranks = [cut(sharded, rank) for rank in (0, 1)]
    optimizers = [Optimizer(leaves, freeze(sharded, wanted), wanted, num_steps=5) for leaves in ranks]
    for step in range(3):
        drawn = fill(whole, step)
        with torch.no_grad():
            for parameter, gradient in zip(gradients.parameters(), drawn, strict=True):
                parameter.copy_(gradient)
        reference.step(step, drawn, ONE, ONE)
        for rank, optimizer in enumerate(optimizers):
            for leaf, share in zip(ranks[rank], cut(gradients, rank), strict=True):
                leaf.tensor.grad = share.tensor.clone()
            optimizer.step(step, [leaf.tensor.grad for leaf in ranks[rank] if leaf.tensor.grad is not None], ONE, ONE)
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_memory_is_told_leaf_by_leaf() -> None:
    module = model()
    leaves = cut(module, 1)
    optimizer = Optimizer(leaves, freeze(module, config()), config(), num_steps=1)
    told = [(leaf.piece.name, key, tuple(tensor.shape)) for leaf, key, tensor in optimizer.state_tensors()]
    assert told[:4] == [
        ("embed.weight", "step", ()),
        ("embed.weight", "exp_avg", (6, 6)),
        ("embed.weight", "exp_avg_sq", (6, 6)),
        ("mid.weight", "step", ()),
    ]
    assert len(told) == 3 * len(leaves)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_rank_may_hold_nothing(name: Any) -> None:
    optimizer = Optimizer((), freeze(model(), config()), config(name=name), num_steps=1)
    optimizer.step(0, [], ONE, ONE)
    assert list(optimizer.state_tensors()) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "rule", "options"), RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_on_the_gpu_as_on_the_cpu_without_a_host_sync(
    keys: dict[str, Any], rule: Any, options: Any, dtype: torch.dtype, tolerance: float
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
        if not ok:
            continue
        for one, other in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(one, other.cpu(), rtol=tolerance, atol=tolerance)

"""Recomputation: fewer bytes kept, the same numbers."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from closeranks.core.errors import ModelError
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.parallel.batch_norm import BatchStatistics, convert_sync_batch_norm
from closeranks.parallel.initialization.materialize import materialize
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.recompute import FAMILIES, KEEP, recompute
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.testing import run_world

CPU = torch.device("cpu")
LENGTH = 16
SPEC = spec_for(
    LlamaConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=64, vocab_size=32, dropout=0.2),
    seq_len=LENGTH,
)
WAYS: list[tuple[str, tuple[str, ...]]] = [
    ("selective", KEEP),
    ("selective", ("matmul",)),
    ("selective", ("attention",)),
    ("selective", ()),
    ("full", ()),
]


def llama(mode: str, keep: tuple[str, ...] = KEEP, dtype: torch.dtype = torch.float64) -> nn.Module:
    module = materialize(SPEC, seed=0, device=CPU, dtype=dtype, broadcast=lambda tensor: tensor)
    recompute(module, SPEC.blocks, mode, keep)
    return module


def tokens(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"tokens": torch.randint(0, 32, (2, LENGTH + 1), generator=generator)}


def loss(module: nn.Module, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return SPEC.loss(module, tokens(number)).total


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("mode", "keep"), WAYS)
def test_losses_gradients_and_masks_are_the_same_bits(mode: str, keep: tuple[str, ...]) -> None:
    plain, module = llama("none"), llama(mode, keep)
    for one in (plain, module):
        # All forwards first, backwards in another order, as pipelines do.
        totals = [loss(one, number) for number in range(3)]
        for number in (1, 0, 2):
            totals[number].backward()
    assert same(gradients(module), gradients(plain))
    assert not torch.equal(loss(plain, 0), loss(plain.eval(), 0)), "the masks are at work"


@pytest.mark.parametrize("bf16", [False, True])
def test_each_step_keeps_less(bf16: bool) -> None:
    def kept(mode: str, keep: tuple[str, ...] = KEEP) -> int:
        module = llama(mode, keep, torch.float32)
        context: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
        with LiveBytes() as live, context:
            total = loss(module, 0)
            held = live.current
        total.backward()
        return held

    assert kept("none") > 1.4 * kept("selective") > 1.4 * kept("full")
    assert kept("selective", ("attention",)) < kept("selective")


@pytest.mark.parametrize(("mode", "keep"), WAYS)
def test_autocast_is_the_same_the_second_time(mode: str, keep: tuple[str, ...]) -> None:
    found = []
    for one in (llama("none", dtype=torch.float32), llama(mode, keep, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(one, 0)
        total.backward()
        found.append(gradients(one))
    assert same(*found)


class Count(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_not_computed_again() -> None:
    def calls(mode: str, keep: tuple[str, ...]) -> tuple[int, int]:
        module = llama(mode, keep, torch.float32)
        with Count() as count:
            loss(module, 0).backward()
        return tuple(sum(count.calls[name] for name in FAMILIES[family]) for family in ("matmul", "attention"))  # type: ignore[return-value]

    products, attentions = calls("none", ())
    assert attentions == len(SPEC.blocks)
    assert calls("selective", KEEP) == (products, attentions)
    more, again = calls("full", ())
    assert again == 2 * attentions
    assert more > products + 5 * len(SPEC.blocks)
    assert calls("selective", ("attention",)) == (more, attentions)


def test_names_and_modules_stay() -> None:
    plain, module = llama("none"), llama("selective")
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in module.named_modules()]
    assert [type(part) for part in plain.modules()] == [type(part) for part in module.modules()]
    assert list(plain.state_dict()) == list(module.state_dict())


def test_without_gradients_nothing_is_wrapped() -> None:
    module = llama("full")
    with torch.no_grad(), Count() as count:
        loss(module, 0)
    attentions = sum(count.calls[name] for name in FAMILIES["attention"])
    assert attentions == len(SPEC.blocks)


class Normed(nn.Module):
    """A block with batch norms of every kind, one of them used twice, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.mean = nn.BatchNorm2d(3, momentum=None)
        self.free = nn.BatchNorm2d(3, track_running_stats=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, image: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.free(self.mean(self.norm(self.norm(self.act(self.conv(image)))))) * scale


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Normed(), Normed()).double()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_batch_statistics_are_taken_once(mode: str) -> None:
    plain, module = net(), net()
    recompute(module, ["0", "1"], mode)
    for one in (plain, module):
        statistics = BatchStatistics(one, RankGroup(0, 1))
        for _ in range(2):
            statistics.begin()
            totals = []
            for number in range(3):
                statistics.next()
                totals.append(one(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(number)).double()))
            for total in reversed(totals):
                total.square().sum().backward()
            statistics.finish(torch.ones(()))
    assert same(gradients(module), gradients(plain))
    assert same(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert float(module[0].norm.running_mean.abs().sum()) > 0
    assert module[0].norm._buffers["running_mean"] is not plain[0].norm.running_mean


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.lin(x)


def test_a_block_that_changes_its_own_buffer_is_refused() -> None:
    module = nn.Sequential(Counting(), nn.Linear(3, 3))
    recompute(module, ["0"], "full")
    with pytest.raises(ModelError, match="'0' changes its buffer 'seen'"):
        module(torch.ones(2, 3))


class Square(torch.autograd.Function):
    """Keeps what it made itself, as custom functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        product = F.linear(x, weight)
        ctx.save_for_backward(x, weight, product)
        return product.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, product = ctx.saved_tensors
        inner = 2 * product * grads[0]
        return inner @ weight, inner.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5).double() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(Square.apply(torch.sin(x), self.weight), 0.3)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("mode", "keep"), WAYS)
def test_custom_functions_inside(mode: str, keep: tuple[str, ...]) -> None:
    found = []
    for way in ("none", mode):
        torch.manual_seed(3)
        module = nn.Sequential(Custom(), Custom())
        recompute(module, ["0", "1"], way, keep)
        module(torch.ones(4, 5).double()).sum().backward()
        found.append(gradients(module))
    assert same(*found)


class Crossed(nn.Module):
    """Sums over ranks in both manners: a returned result, and one written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        hidden = torch.tanh(self.lin(x))
        total = SumReturned.apply(hidden, name)  # type: ignore[no-untyped-call]
        return torch.sin(total) * SumInPlace.apply(torch.cos(hidden))  # type: ignore[no-untyped-call]


class SumReturned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def cross(mode: str, keep: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, int]]:
    torch.manual_seed(2)
    module = nn.Sequential(Crossed(), Crossed()).double()
    recompute(module, ["0", "1"], mode, keep)
    torch.manual_seed(dist.get_rank())
    with Count() as count:
        module(torch.randn(3, 4).double()).square().sum().backward()
    return {name: grad.numpy() for name, grad in gradients(module).items()}, dict(count.calls)


@pytest.mark.world
def test_a_kept_collective_travels_once() -> None:
    plain = run_world(cross, 2, "none", ())
    ways: list[tuple[str, tuple[str, ...], int]] = [("selective", KEEP, 2), ("selective", ("matmul",), 4)]
    for mode, keep, num_sums in ways:
        for (grads, calls), (expected, _) in zip(run_world(cross, 2, mode, keep), plain, strict=True):
            assert all((grads[name] == expected[name]).all() for name in expected)
            assert calls["_c10d_functional::all_reduce"] == num_sums
            assert calls["c10d::allreduce_"] == 4, "in place: done again, whatever is kept"


def shard(mode: str) -> dict[str, Any]:
    module = llama(mode, dtype=torch.float64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for name in SPEC.blocks:
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    totals = [loss(module, number) for number in range(2)]
    for total in totals:
        total.backward()
    return {name: p.grad.full_tensor().numpy() for name, p in module.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.world
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_under_fsdp(mode: str) -> None:
    (plain, _), (grads, _) = run_world(shard, 2, "none"), run_world(shard, 2, mode)
    assert plain.keys() == grads.keys()
    for name, expected in plain.items():
        assert (grads[name] == expected).all(), name


def synchronised(mode: str) -> dict[str, Any]:
    module = net()
    convert_sync_batch_norm(module, None)
    recompute(module, ["0", "1"], mode)
    torch.manual_seed(dist.get_rank())
    module(torch.randn(4, 3, 5, 5).double()).square().sum().backward()
    return {name: t.detach().numpy() for name, t in [*gradients(module).items(), *module.named_buffers()]}


@pytest.mark.world
def test_synchronised_batch_norm() -> None:
    for plain, found in zip(run_world(synchronised, 2, "none"), run_world(synchronised, 2, "selective"), strict=True):
        assert all((found[name] == plain[name]).all() for name in plain)


def _saved_bytes(total: Tensor) -> int:
    """What compiled graphs keep for backward."""
    seen, pending, found = set(), [total.grad_fn], {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        if "CompiledFunction" in type(node).__name__:
            found |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in node.saved_tensors}
    assert found, "nothing was compiled"
    return sum(found.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler touches all of torch, and torch warns it of that
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_compiled_afterwards(mode: str) -> None:
    spec = spec_for(SPEC.config.model_copy(update={"dropout": 0.0}), seq_len=LENGTH)  # type: ignore[attr-defined]
    found, held = [], []
    for way in ("none", mode):
        module = materialize(spec, seed=0, device=CPU, dtype=torch.float64, broadcast=lambda tensor: tensor)
        recompute(module, spec.blocks, way)
        for name in spec.blocks:
            module.get_submodule(name).compile()
        spec.loss(module, tokens(0)).total.backward()
        module.zero_grad()
        total = spec.loss(module, tokens(0)).total
        held.append(_saved_bytes(total))
        total.backward()
        found.append(gradients(module))
    plain, other = found
    for name, expected in plain.items():
        assert torch.allclose(other[name], expected, rtol=1e-10, atol=1e-12), name
    assert held[1] < held[0]

"""Units of ZeRO-3: chosen by a pure function; what FSDP2 then gathers, in which format, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from closeranks.parallel.fully_shard import ModuleFacts, choose_fsdp_units, describe_modules, shard_fully
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.fully_sharded import FullyShardedReducer
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.testing import run_world
from tests.sync.strategies import traffic


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self, width: int = 10, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BLOCKS = tuple(f"blocks.{number}" for number in range(3))


def test_named_blocks_are_the_units() -> None:
    assert choose_fsdp_units(describe_modules(Stack()), BLOCKS) == BLOCKS


def test_without_names_repeated_modules_and_large_ones_are_chosen() -> None:
    assert choose_fsdp_units(describe_modules(Stack(depth=6)), ()) == (
        "embed",
        *(f"blocks.{n}" for n in range(6)),
        "head",
    )
    assert choose_fsdp_units(describe_modules(nn.Sequential(*(Block(8) for _ in range(4)))), ()) == ("0", "1", "2", "3")


def test_a_large_module_is_opened_a_small_one_left_to_the_root() -> None:
    stages = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*(Block(12) for _ in range(6))), nn.Linear(40, 40))
    assert choose_fsdp_units(describe_modules(stages), ()) == (*(f"1.{number}" for number in range(6)), "2")


def test_tied_modules_stay_together_in_the_root() -> None:
    assert choose_fsdp_units(describe_modules(Stack(depth=6, tied=True)), ()) == tuple(
        f"blocks.{number}" for number in range(6)
    )
    assert choose_fsdp_units(describe_modules(Stack(tied=True)), (*BLOCKS, "head")) == BLOCKS


def test_what_torch_computes_with_weights_of_children_is_not_opened() -> None:
    """Attention multiplies with its projection's weight without calling the projection."""
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(2, 2))
    assert choose_fsdp_units(describe_modules(model), ()) == ("0",)


@st.composite
def trees(draw: st.DrawFn) -> list[ModuleFacts]:
    """Modules with random parents, sizes and shared parameters, parents before children."""
    names = [""]
    for number in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(names))
        names.append(f"{parent}.{number}" if parent else str(number))
    shared = [f"tied{number}" for number in range(2)]
    return [
        ModuleFacts(
            name,
            tuple(
                (f"{name}.w" if own == "own" else own, 50)
                for own in draw(st.lists(st.sampled_from(["own", *shared]), unique=True))
            ),
            runs=draw(st.booleans()),
            is_open=draw(st.booleans()),
        )
        for name in names
    ]


@given(trees(), st.data())
def test_units_part_the_model(modules: list[ModuleFacts], data: st.DataObject) -> None:
    names = [facts.name for facts in modules if facts.name]
    leaves = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    blocks = data.draw(st.lists(st.sampled_from(leaves), unique=True)) if data.draw(st.booleans()) else []
    units = choose_fsdp_units(modules, blocks)
    owners = {facts.name: {parameter for parameter, _ in facts.own} for facts in modules}
    for unit in units:
        assert next(facts for facts in modules if facts.name == unit).runs
        inside = [name for name in owners if name == unit or name.startswith(f"{unit}.")]
        parameters = set().union(*(owners[name] for name in inside))
        assert parameters, "an empty unit would gather nothing"
        assert all(name in inside for name, own in owners.items() if own & parameters), "what is tied stays together"
        assert not any(other != unit and other in inside for other in units), "units do not contain one another"
    assert list(units) == [name for name in owners if name in units]


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def gathered(precision: str, prefetch: int, overlap: bool) -> tuple[list[tuple[str, int]], list[float]]:
    """Collectives of a step, and its gradients' norms."""
    torch.manual_seed(0)
    module, choice = Stack(), Precision(precision)
    mesh = mesh_of_all()
    shard_fully(module, BLOCKS, mesh, precision=choice, hold="shards", prefetch=prefetch, overlap=overlap)
    group = RankGroup(dist.get_rank(), dist.get_world_size(), mesh.get_group())
    reducer = FullyShardedReducer(local_parameters(module), [module], group, RankGroup(0, 1), hold="shards")
    tokens = torch.arange(8).view(2, 4)
    with traffic() as sent:
        with choice.context(torch.device("cpu")):
            loss = module(tokens).float().square().sum()
        reducer.begin_backward(is_last=True)
        loss.backward()
        reducer.end_backward()
        reducer.finish()
    assert {gradient.dtype for gradient in reducer.gradients()} == {torch.float32}
    return sent, [gradient.norm().item() for gradient in reducer.gradients()]


def gather_bytes(sent: list[tuple[str, int]]) -> int:
    return sum(num_bytes for name, num_bytes in sent if "allgather" in name)


@pytest.mark.world
def test_bf16_halves_what_blocks_gather_and_nothing_else() -> None:
    block = sum(p.numel() for p in Block(10).parameters()) + 20  # and rows that pad
    wide, norms = run_world(gathered, 2, "float32", 1, True)[0]
    narrow, rounded = run_world(gathered, 2, "bf16", 1, True)[0]
    half, _ = run_world(gathered, 2, "fp16", 1, True)[0]
    assert gather_bytes(half) == gather_bytes(wide)
    saved = gather_bytes(wide) - gather_bytes(narrow)
    assert 5 * 2 * (block - 20) <= saved <= 5 * 2 * block, "three blocks forward, and all but the last backward"
    assert [entry for entry in wide if "reduce" in entry[0]] == [entry for entry in narrow if "reduce" in entry[0]]
    assert rounded == pytest.approx(norms, rel=0.1)


@pytest.mark.world
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_looking_ahead_changes_the_order_and_not_the_result(precision: str) -> None:
    plain, norms = run_world(gathered, 2, precision, 0, False)[0]
    for prefetch in (0, 1, 2, 9):
        sent, same = run_world(gathered, 2, precision, prefetch, True)[0]
        assert sorted(sent) == sorted(plain)
        assert same == norms
        first_reduction = next(number for number, entry in enumerate(sent) if "reduce" in entry[0])
        ahead = len([name for name, _ in sent[:first_reduction] if "allgather" in name])
        # Root and three blocks forward; the last block stays. Before its gradients leave, those ahead are gathered.
        assert ahead == 4 + min(prefetch, 2), prefetch


def from_meta() -> bool:
    """Built without memory, sharded, then filled row by row."""
    mesh = mesh_of_all()
    with torch.device("meta"):
        module = Stack().double()
    shard_fully(module, BLOCKS, mesh, precision=Precision("float64"), hold="shards", prefetch=1)
    module.to_empty(device="cpu")
    group = RankGroup(dist.get_rank(), dist.get_world_size(), mesh.get_group())
    torch.manual_seed(0)
    whole = Stack().double()
    values = dict(whole.named_parameters())
    reducer = FullyShardedReducer(local_parameters(module), [module], group, RankGroup(0, 1), hold="shards")
    for leaf in reducer.parameter_shards():
        start, size = leaf.piece.start[0], leaf.piece.size[0]
        leaf.tensor.copy_(values[leaf.piece.name].detach()[start : start + size])
    tokens = torch.arange(6).view(2, 3)
    same = torch.equal(module(tokens), whole(tokens))
    for leaf in reducer.parameter_shards():  # an update after the weights were gathered
        leaf.tensor.mul_(0.5)
    reducer.gather_parameters()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.5)
    return same and torch.equal(module(tokens), whole(tokens))


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 3])
def test_a_model_without_memory_is_sharded_and_filled(size: int) -> None:
    assert run_world(from_meta, size) == [True] * size


def odd_parameters() -> list[Any]:
    """A scalar, and a convolution in another memory order."""
    mesh = mesh_of_all()
    module = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(20, 1))
    module = module.to(memory_format=torch.channels_last)
    module.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    units = shard_fully(module, (), mesh, precision=Precision("float32"), hold="step", prefetch=0)
    group = RankGroup(dist.get_rank(), dist.get_world_size(), mesh.get_group())
    reducer = FullyShardedReducer(local_parameters(module), [module], group, RankGroup(0, 1), hold="step")
    reducer.begin_backward(is_last=True)
    (module(torch.ones(1, 2, 4, 4)).sum() * module.scale * 0.0 + module.scale).backward()
    reducer.finish()
    scale = next(leaf for leaf in reducer.parameter_shards() if leaf.piece.name == "scale")
    return [units, scale.tensor.grad.item(), scale.is_primary]


@pytest.mark.world
def test_scalars_stay_whole_and_memory_order_is_given_up() -> None:
    assert run_world(odd_parameters, 2) == [[("0", "2"), 2.0, True], [("0", "2"), 2.0, False]]

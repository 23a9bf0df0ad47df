from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece, narrow_to_piece
from closeranks.core.protocols import ModelSpec
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig, ModelConfig, PairsConfig
from closeranks.models.user import UserSpec
from closeranks.parallel.initialization.materialize import (
    BuiltModule,
    InitTarget,
    build_module,
    init_targets,
    materialize,
    to_empty,
)
from closeranks.parallel.initialization.tied_tensors import named_tensors
from closeranks.parallel.process_group import RankGroup
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.testing import run_world
from tests.parallel.zoo import FAITHFUL, UNFAITHFUL, Factory, Pretrained, goes_through_numpy, shares_memory

CPU = torch.device("cpu")
TIED = LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, tied=True)
OURS: list[ModelConfig] = [TIED, TIED.model_copy(update={"tied": False}), DigitsConfig(), PairsConfig()]


def alone(tensor: Tensor) -> Tensor:
    return tensor


def made(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    spec = spec_for(config, seq_len=16)
    return materialize(spec, seed=seed, device=CPU, dtype=dtype, broadcast=alone)


class Towers:
    """A spec whose module is declared in either order."""

    builds_on_meta = True

    def __init__(self, *names: str) -> None:
        self._names = names
        self.device_at_build = ""

    def build(self) -> nn.Module:
        module = nn.ModuleDict({name: nn.Linear(4, 3) for name in self._names})
        self.device_at_build = next(module.parameters()).device.type
        return module

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(generator=generator)

    def init_buffers(self, module: nn.Module) -> None:
        pass


def filled(spec: Towers, seed: int = 0) -> dict[str, Tensor]:
    return materialize(spec, seed=seed, device=CPU, dtype=torch.float32, broadcast=alone).state_dict()  # type: ignore[arg-type]


def test_weights_follow_from_seed_and_name_alone() -> None:
    one, other = filled(Towers("left", "right")), filled(Towers("more", "right", "left"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert not torch.equal(one["left.weight"], one["right.weight"])
    assert not torch.equal(one["left.weight"], filled(Towers("left", "right"), seed=1)["left.weight"])


def test_weights_do_not_depend_on_what_was_drawn_before() -> None:
    before = filled(Towers("left"))
    torch.rand(100)
    assert torch.equal(filled(Towers("left"))["left.weight"], before["left.weight"])


def test_nothing_is_allocated_before_it_is_filled() -> None:
    spec = Towers("left")
    filled(spec)
    assert spec.device_at_build == "meta"


@pytest.mark.parametrize("config", OURS, ids=lambda config: f"{config.name}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_parameter_and_buffer_is_real_and_finite(config: ModelConfig, dtype: torch.dtype) -> None:
    module = made(config, dtype=dtype)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device == CPU, name
        assert bool(torch.isfinite(tensor).all()), name
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}


def test_tied_weights_stay_one_tensor() -> None:
    module = made(TIED)
    assert module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    assert "lm_head.weight" not in dict(module.named_parameters()), "one parameter, counted once"
    apart = made(TIED.model_copy(update={"tied": False}))
    assert apart.get_parameter("lm_head.weight") is not apart.get_parameter("model.embed_tokens.weight")


def test_float64_starts_from_the_same_numbers_as_float32() -> None:
    """Else a proof in float64 would be one about another model."""
    wide, narrow = made(TIED, dtype=torch.float64), made(TIED)
    for name, parameter in narrow.named_parameters():
        assert torch.allclose(parameter.double(), wide.get_parameter(name), atol=1e-6), name


def test_a_users_factory_draws_by_the_seed() -> None:
    spec = UserSpec("own:net", lambda: nn.Linear(4, 2))
    one, two, other = (
        materialize(spec, seed=seed, device=CPU, dtype=torch.float32, broadcast=alone).get_parameter("weight")
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


class Drawn(nn.Module):
    """Draws from numpy, differently on every rank; holds one tensor of each kind that must travel."""

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(dist.get_rank())
        self.weight = nn.Parameter(torch.from_numpy(draw.normal(size=(3, 4))))
        self.image = nn.Parameter(
            torch.from_numpy(draw.normal(size=(2, 3, 4, 4))).to(memory_format=torch.channels_last)
        )
        self.register_buffer("mask", torch.from_numpy(draw.random(8) < 0.5))
        self.register_buffer("count", torch.tensor(int(draw.integers(1000))))


def drawn_apart(own: Callable[[], nn.Module]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    torch.manual_seed(0)
    before = {name: tensor.float().numpy().copy() for name, tensor in own().state_dict().items()}
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    spec = UserSpec("own:Drawn", own)
    module = materialize(spec, seed=0, device=CPU, dtype=torch.float32, broadcast=group.broadcast)
    return before, {name: tensor.float().numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.mark.world
def test_ranks_that_drew_apart_all_start_from_rank_0s_weights() -> None:
    (drawn, first), *others = run_world(drawn_apart, 3, Drawn)
    for name, values in drawn.items():
        np.testing.assert_allclose(first[name], values, rtol=1e-6, err_msg="rank 0 keeps its own")
    for before, after in others:
        assert not np.allclose(before["weight"], drawn["weight"]), "the ranks drew the same: nothing is shown"
        for name, values in first.items():
            np.testing.assert_array_equal(after[name], values, err_msg=name)


def built(spec: ModelSpec, *, sharded: bool = True, dtype: torch.dtype = torch.float32) -> BuiltModule:
    return build_module(spec, seed=0, device=CPU, dtype=dtype, group=RankGroup(0, 1), sharded=sharded)


def in_shares(spec: ModelSpec, dim: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Cut every parameter's dim while it has no data, then fill what is left."""
    source = built(spec, dtype=dtype)
    module = source.module
    pieces = {}
    for name, parameter in module.named_parameters():
        whole = Piece.whole(name, tuple(parameter.shape))
        pieces[name] = piece = whole.shard(min(dim, parameter.ndim - 1), rank, size) if parameter.ndim else whole
        owner, _, attribute = name.rpartition(".")
        share = nn.Parameter(torch.empty(piece.size, dtype=parameter.dtype, device="meta"))
        module.get_submodule(owner).register_parameter(attribute, share)
    to_empty(module, CPU)
    init_targets([InitTarget(module.get_parameter(name), piece) for name, piece in pieces.items()], source.source, CPU)
    source.source.fill_buffers(module)
    return dict(named_tensors(module))


def user(factory: Factory) -> ModelSpec:
    return UserSpec("own:net", factory)


SPECS = {
    **{f"{config.name} {number}": spec_for(config, seq_len=16) for number, config in enumerate(OURS[1:])},
    **{name: user(FAITHFUL[name]) for name in ("resnet", "vision", "tables", "transformer", "formats")},
    "not recorded": user(goes_through_numpy),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_are_pieces_of_the_whole(name: str, dtype: torch.dtype) -> None:
    whole = materialize(SPECS[name], seed=0, device=CPU, dtype=dtype, broadcast=alone)
    for dim in (0, 1):
        shares = [in_shares(SPECS[name], dim, rank, 2, dtype) for rank in range(2)]
        for key, parameter in whole.named_parameters():
            found = [share[key] for share in shares]
            joined = torch.cat(found, min(dim, parameter.ndim - 1)) if parameter.ndim else found[1]
            assert torch.equal(joined, parameter), key
        for key, buffer in whole.named_buffers():
            assert torch.equal(shares[1][key], buffer), key


@given(st.data())
def test_any_piece_can_be_cut_out(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    piece, box = Piece.whole("x", shape), whole
    for dim in range(len(shape)):
        index, parts = data.draw(st.integers(0, 1)), data.draw(st.integers(2, 3))
        piece = piece.shard(dim, index, parts)
        box = box.narrow(dim, piece.start[dim], piece.size[dim])
    assert torch.equal(narrow_to_piece(whole, piece), box)
    first = data.draw(st.integers(0, piece.numel))
    last = data.draw(st.integers(first, piece.numel))
    assert torch.equal(narrow_to_piece(whole, piece.flattened(first, last)), box.reshape(-1)[first:last])


def test_a_users_module_that_nobody_shards_is_built_as_ever() -> None:
    plain = materialize(user(Pretrained), seed=0, device=CPU, dtype=torch.float32, broadcast=alone)
    whole = built(user(Pretrained), sharded=False)
    assert not whole.is_meta
    assert not whole.warning
    for (name, own), (_, other) in zip(named_tensors(whole.module), named_tensors(plain), strict=True):
        assert torch.equal(own, other), name


def test_a_module_that_cannot_be_recorded_is_built_whole_and_said_so() -> None:
    source = built(user(UNFAITHFUL["own generator"]))
    assert source.is_meta
    assert all(tensor.is_meta for tensor in source.module.parameters())
    assert "built whole" in source.warning
    assert "generator of its own" in source.warning
    assert not built(user(Pretrained)).warning


def test_parameters_that_share_memory_cannot_be_sharded() -> None:
    with pytest.raises(ModelError, match="'left' and 'right' share memory"):
        built(user(shares_memory))


def test_a_mistake_in_a_factory_is_still_the_users() -> None:
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        built(user(lambda: nn.Linear(1 // 0, 2)))


BIG = LlamaConfig(dim=64, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=128)


def peak_of(config: ModelConfig, num_shards: int) -> tuple[int, int, int]:
    """Bytes at most, of the own pieces and buffers, and of the largest parameter."""
    spec = spec_for(config, seq_len=16)
    largest = max(p.numel() * 4 for p in made(config).parameters())
    with LiveBytes() as live:
        tensors = in_shares(spec, 0, 1, num_shards)
    return live.peak, sum(tensor.numel() * 4 for tensor in tensors.values()), largest


def test_no_more_lives_than_the_own_pieces_and_one_parameter() -> None:
    with LiveBytes() as live:
        made(BIG)
    peak, own, largest = peak_of(BIG, 4)
    assert peak <= own + largest + 65536
    assert live.peak > 2 * peak, "the control: the whole module costs more"


def test_the_counter_of_bytes_counts_storages_until_they_are_freed() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        kept = torch.ones(1000)
        view = kept[10:].view(-1).t()
        assert live.current == 4000
        del kept
        assert live.current == 4000, "the view holds it"
        view.untyped_storage().resize_(0)
        assert live.current == 0
        view.untyped_storage().resize_(800)
        assert live.current == 800
        torch.ones(5000)
        del view
        assert (live.current, live.peak) == (0, 20800)
        live.watch([before, before[1:]])
        assert live.current == 4000
        live.rest()
        assert live.peak == 4000


def test_ties_of_buffers_and_parameters_stay() -> None:
    module = nn.ModuleList([nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta"), nn.BatchNorm1d(3)])
    module[1].weight = module[0].weight
    module[2].register_buffer("again", module[2].running_mean)
    to_empty(module, CPU)
    assert module[1].weight is module[0].weight
    assert module[2].again is module[2].running_mean
    assert not module[1].weight.is_meta


def shard(tied: bool) -> list[Any]:
    spec = spec_for(TIED.model_copy(update={"tied": tied}), seq_len=16)
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    source = build_module(spec, seed=0, device=CPU, dtype=torch.float32, group=group, sharded=True)
    module = source.module
    pieces = {
        name: Piece.whole(name, tuple(p.shape)).shard(0, group.rank, group.size)
        for name, p in module.named_parameters()
    }
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size,))
    for name in spec.blocks:
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    to_empty(module, CPU)
    targets = [InitTarget(p.to_local(), pieces[name]) for name, p in module.named_parameters()]  # type: ignore[attr-defined]
    init_targets(targets, source.source, CPU)
    source.source.fill_buffers(module)
    is_tied = module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    tokens = torch.arange(17)[None]
    total = spec.loss(module, {"tokens": tokens}).total
    total.backward()
    is_still = module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight")
    whole = {name: p.full_tensor().detach().numpy() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    return [is_tied, is_still, total.item(), whole]


@pytest.mark.world
@pytest.mark.parametrize("tied", [True, False])
def test_under_fsdp_the_shards_are_filled_and_ties_stay(tied: bool) -> None:
    """Three ranks: 32 rows do not divide, so the last shard is short."""
    config = TIED.model_copy(update={"tied": tied})
    plain, spec = made(config), spec_for(config, seq_len=16)
    total = spec.loss(plain, {"tokens": torch.arange(17)[None]}).total.item()
    for is_tied, is_still, found, whole in run_world(shard, 3, tied):
        assert is_tied == is_still == tied
        assert found == pytest.approx(total, rel=1e-5)
        for name, parameter in plain.named_parameters():
            np.testing.assert_array_equal(whole[name], parameter.detach().numpy(), err_msg=name)


def agree(own: Callable[[], nn.Module]) -> tuple[str, dict[str, np.ndarray]]:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    source = build_module(user(own), seed=0, device=CPU, dtype=torch.float32, group=group, sharded=True)
    to_empty(source.module, CPU)
    targets = [InitTarget(p, Piece.whole(name, tuple(p.shape))) for name, p in source.module.named_parameters()]
    init_targets(targets, source.source, CPU)
    source.source.fill_buffers(source.module)
    return source.warning, {name: t.detach().float().numpy() for name, t in named_tensors(source.module)}


def refused_on_one_rank() -> nn.Module:
    return goes_through_numpy() if dist.get_rank() == 1 else nn.Linear(3, 3)


@pytest.mark.world
@pytest.mark.parametrize("own", [Drawn, refused_on_one_rank, Pretrained])
def test_ranks_agree_on_how_a_factory_is_built(own: Callable[[], nn.Module]) -> None:
    """Drawn differs between ranks without torch's knowledge: recorded alone, they would start from different models."""
    (warning, first), *others = run_world(agree, 2, own)
    assert bool(warning) == (own is not Pretrained)
    for also, values in others:
        assert bool(also) == bool(warning)
        for name, expected in first.items():
            np.testing.assert_array_equal(values[name], expected, err_msg=name)

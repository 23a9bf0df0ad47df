from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig, ModelConfig, PairsConfig
from closeranks.models.user import UserSpec
from closeranks.parallel.group import Group
from closeranks.parallel.materialise import materialise
from closeranks.testing import run_world

CPU = torch.device("cpu")
TIED = LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, tied=True)
OURS: list[ModelConfig] = [TIED, TIED.model_copy(update={"tied": False}), DigitsConfig(), PairsConfig()]


def alone(tensor: Tensor) -> Tensor:
    return tensor


def made(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    spec = spec_for(config, seq_len=16)
    return materialise(spec, seed=seed, device=CPU, dtype=dtype, broadcast=alone)


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


def fill(spec: Towers, seed: int = 0) -> dict[str, Tensor]:
    return materialise(spec, seed=seed, device=CPU, dtype=torch.float32, broadcast=alone).state_dict()  # type: ignore[arg-type]


def test_weights_follow_from_seed_and_name_alone() -> None:
    one, other = fill(Towers("left", "right")), fill(Towers("more", "right", "left"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert not torch.equal(one["left.weight"], one["right.weight"])
    assert not torch.equal(one["left.weight"], fill(Towers("left", "right"), seed=1)["left.weight"])


def test_weights_do_not_depend_on_what_was_drawn_before() -> None:
    before = fill(Towers("left"))
    torch.rand(100)
    assert torch.equal(fill(Towers("left"))["left.weight"], before["left.weight"])


def test_nothing_is_allocated_before_it_is_filled() -> None:
    spec = Towers("left")
    fill(spec)
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
        materialise(spec, seed=seed, device=CPU, dtype=torch.float32, broadcast=alone).get_parameter("weight")
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


def build(own: Callable[[], nn.Module]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    torch.manual_seed(0)
    before = {name: tensor.float().numpy().copy() for name, tensor in own().state_dict().items()}
    group = Group(dist.get_rank(), dist.get_world_size())
    spec = UserSpec("own:Drawn", own)
    module = materialise(spec, seed=0, device=CPU, dtype=torch.float32, broadcast=group.broadcast)
    return before, {name: tensor.float().numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.mark.world
def test_ranks_that_drew_apart_all_start_from_rank_0s_weights() -> None:
    (drawn, first), *others = run_world(build, 3, Drawn)
    for name, values in drawn.items():
        np.testing.assert_allclose(first[name], values, rtol=1e-6, err_msg="rank 0 keeps its own")
    for before, after in others:
        assert not np.allclose(before["weight"], drawn["weight"]), "the ranks drew the same: nothing is shown"
        for name, values in first.items():
            np.testing.assert_array_equal(after[name], values, err_msg=name)

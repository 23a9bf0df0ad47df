"""Factories as people write them, for tests of recorded initialisation."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Factory = Callable[[], nn.Module]


def initialised(init: Callable[[Tensor], Any], *shape: int) -> Factory:
    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(*shape))
        init(module.weight)
        return module

    return make


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(width)


def resnet() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 8, 7), ResidualBlock(8), ResidualBlock(8), nn.Linear(8, 5))
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.constant_(part.weight, 1)
            nn.init.constant_(part.bias, 0)
    for part in module.modules():
        if isinstance(part, ResidualBlock):
            nn.init.constant_(part.bn2.weight, 0)
    return module


class Pretrained(nn.Module):
    """Built first, then initialised anew in a loop over all modules, then rescaled by depth."""

    def __init__(self, num_layers: int = 3, dim: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(20, dim, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(c_fc=nn.Linear(dim, 2 * dim), c_proj=nn.Linear(2 * dim, dim)))
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 20, bias=False)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), persistent=False)
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * num_layers))
        for depth, block in enumerate(self.blocks):
            block.c_fc.weight.data.div_(math.sqrt(2.0 * (depth + 1)))
        self.head.weight = self.wte.weight

    def _init(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(mean=0.0, std=0.02)
            if part.bias is not None:
                part.bias.data.zero_()
        elif isinstance(part, nn.Embedding):
            part.weight.data.normal_(mean=0.0, std=0.02)
            if part.padding_idx is not None:
                part.weight.data[part.padding_idx].zero_()
        elif isinstance(part, nn.LayerNorm):
            part.bias.data.zero_()
            part.weight.data.fill_(1.0)


class Vision(nn.Module):
    """Asks tensors for their values: rates of stochastic depth as a list, a scale as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.more = torch.linspace(0, 1, 5).tolist()
        self.layers = nn.ModuleList(nn.Linear(6 + round(10 * rate), 4) for rate in self.rates)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.pos_embed = nn.Parameter(torch.randn(1, 9, 6) * 0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))
        if self.pos_embed.abs().max() > 0.01:
            self.extra = nn.Linear(3, 3)


class Tables(nn.Module):
    """Buffers and plain attributes that follow from shapes and from data."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6, device="cpu").float(), 1.0 / 10 ** torch.linspace(0, 1, 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("slopes", torch.tensor([2.0**-power for power in range(4)]))
        self.register_buffer("index", torch.from_numpy(np.arange(12).reshape(3, 4).astype(np.int64)))
        self.register_buffer("kept", torch.nonzero(torch.arange(6) % 2).flatten())
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu_(1))
        self.register_buffer("sums", torch.cumsum(torch.ones(5), 0))
        self.weight = nn.Parameter(torch.from_numpy(np.random.default_rng(3).normal(size=(4, 3))).float())
        self.scale = torch.sqrt(torch.FloatTensor([16.0]))
        self.grid = {"rows": [torch.arange(3), torch.ones(2)]}


class Legacy(nn.Module):
    """Old ways to make a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(5, 4))
        self.bias = nn.Parameter(torch.FloatTensor(5))
        bound = 1 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-bound, bound)
        self.bias.data = torch.rand(5) - 0.5
        self.other = nn.Parameter(self.weight.new_empty(3, 4).normal_())
        with torch.no_grad():
            self.other[1:].copy_(torch.eye(4)[:2])
            self.other[0, 2] = 7.0


class Resized(nn.Module):
    """Stretches what another part drew."""

    def __init__(self) -> None:
        super().__init__()
        small = nn.Embedding(9, 4)
        grid = small.weight.t().reshape(1, 4, 3, 3)
        stretched = F.interpolate(grid, size=(5, 5), mode="bicubic", align_corners=False)
        self.pos = nn.Parameter(stretched.flatten(2).transpose(1, 2).detach().contiguous())
        self.after = nn.Linear(4, 4)


def drawn_until_small() -> nn.Module:
    """How often it draws depends on what it drew."""
    module = nn.Linear(6, 6)
    with torch.no_grad():
        while bool((module.weight.abs() > 1.0).any()):
            module.weight.normal_(0, 0.6)
        nn.init.normal_(module.bias)
    return module


def seeded_inside() -> nn.Module:
    first = nn.Linear(4, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        second = nn.Linear(4, 4)
        third = nn.Linear(4, 4)
    fourth = nn.Linear(4, 4)
    torch.manual_seed(3)
    return nn.ModuleList([first, second, third, fourth, nn.Linear(4, 4)])


def many_draws() -> nn.Module:
    module = nn.Module()
    means = torch.arange(1.0, 5.0)
    module.a = nn.Parameter(torch.normal(means, means / 10))
    module.b = nn.Parameter(torch.bernoulli(torch.full((7,), 0.3)))
    module.c = nn.Parameter(torch.randperm(9).float())
    module.d = nn.Parameter(torch.empty(6).exponential_(2.0))
    module.e = nn.Parameter(torch.randint(0, 50, (4,)).double())
    module.f = nn.Parameter(torch.multinomial(torch.rand(8), 5).float())
    module.g = nn.Parameter(torch.randn_like(module.a) + torch.rand(4))
    return module


def initialised_by_numpy() -> nn.Module:
    rng = np.random.default_rng(5)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    saved = {name: torch.from_numpy(rng.normal(size=tuple(p.shape))) for name, p in module.named_parameters()}
    module.load_state_dict(saved)
    return module


def half_and_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2).double(), nn.Linear(4, 2))
    module[2].requires_grad_(False)
    return module


def read_while_overwritten() -> nn.Module:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight.copy_(module.weight.flip(0))
        module.weight[:2].copy_(module.weight[2:])
        module.bias.copy_(module.weight.sum(0))
        module.weight.fill_(0.5).add_(module.bias)
    return module


FAITHFUL: dict[str, Factory] = {
    "linear": lambda: nn.Linear(5, 7),
    "kaiming": initialised(nn.init.kaiming_uniform_, 6, 5, 3),
    "xavier": initialised(nn.init.xavier_normal_, 6, 5),
    "orthogonal tall": initialised(nn.init.orthogonal_, 9, 4),
    "orthogonal wide": initialised(lambda tensor: nn.init.orthogonal_(tensor, gain=2.0), 3, 20),
    "truncated": initialised(nn.init.trunc_normal_, 40, 3),
    "sparse": initialised(lambda tensor: nn.init.sparse_(tensor, 0.4), 10, 4),
    "eye": initialised(nn.init.eye_, 5, 4),
    "dirac": initialised(nn.init.dirac_, 4, 4, 3),
    "embedding": lambda: nn.Embedding(12, 5, padding_idx=3),
    "lstm": lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "resnet": resnet,
    "post init": Pretrained,
    "vision": Vision,
    "tables": Tables,
    "legacy": Legacy,
    "resized": Resized,
    "until small": drawn_until_small,
    "seeded inside": seeded_inside,
    "many draws": many_draws,
    "numpy": initialised_by_numpy,
    "formats": half_and_frozen,
    "read while overwritten": read_while_overwritten,
}


class Hidden:
    def __init__(self, table: Tensor) -> None:
        self.table = table


def keeps_a_tensor_out_of_sight() -> nn.Module:
    module = nn.Linear(3, 3)
    module.hidden = Hidden(torch.arange(3))  # type: ignore[assignment]
    return module


def keeps_an_alias() -> nn.Module:
    module = nn.Linear(3, 3)
    module.alias = module.weight.data[:2]
    return module


def shares_memory() -> nn.Module:
    module = nn.Module()
    module.left = nn.Parameter(torch.randn(3, 3))
    module.right = nn.Parameter(module.left.data.t())
    return module


def draws_from_its_own_generator() -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(4))
    return module


def goes_through_numpy() -> nn.Module:
    module = nn.Linear(3, 3)
    module.bias.data = torch.from_numpy(torch.arange(3.0).numpy() * 2)
    return module


HANDED_OVER = nn.Linear(3, 3)


def changes_what_was_there() -> nn.Module:
    table = torch.frombuffer(bytearray(16), dtype=torch.float32)
    table.add_(1.0)
    return nn.Linear(3, 3)


UNFAITHFUL: dict[str, Factory] = {
    "hidden": keeps_a_tensor_out_of_sight,
    "alias": keeps_an_alias,
    "shared": shares_memory,
    "own generator": draws_from_its_own_generator,
    "through numpy": goes_through_numpy,
    "handed over": lambda: HANDED_OVER,
    "lazy": lambda: nn.LazyLinear(3),
    "changes": changes_what_was_there,
}

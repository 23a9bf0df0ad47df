"""Tracing any module: its products, its activations and its FLOPs are those of a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.protocols import Loss
from closeranks.facts.shapes.llama import flops_per_token, num_params
from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.models.flop_count import dataless_settings
from closeranks.models.module_trace import trace_module

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.feed(x)


class Net(nn.Module):
    """A convolution, blocks with attention, a head: what lies between units, and products of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def batch_of(num_samples: int) -> dict[str, Tensor]:
    return {"x": torch.ones(num_samples, 3, 8, 12), "y": torch.zeros(num_samples, dtype=torch.int64)}


def loss(net: nn.Module, batch: Any) -> Loss:
    total = nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum")
    return Loss(total, len(batch["y"]))


def trace_of(net: nn.Module, compute: Callable[..., Loss] = loss) -> ModuleTrace:
    return trace_module(net, batch_of, compute, units=("blocks.0", "blocks.1"), blocks=("blocks.0", "blocks.1"))


def test_units_are_the_blocks_and_the_rest() -> None:
    trace = trace_of(Net())
    assert [(unit.name, unit.is_block) for unit in trace.units] == [("blocks.0", True), ("blocks.1", True), ("", False)]
    assert trace.units[0].num_params == sum(parameter.numel() for parameter in Block().parameters())
    assert trace.num_params == sum(parameter.numel() for parameter in Net().parameters())
    assert trace.untraced == ()
    first, second, rest = trace.units
    assert first.products == second.products
    assert first.saved_activation_bytes == second.saved_activation_bytes > 0
    assert Product(6, WIDTH, 3 * 16) in rest.products, "a convolution, as the product it amounts to"
    assert Product(6, 4 * WIDTH, WIDTH) in first.products
    assert Product(4 * WIDTH, WIDTH, 6, grows="k") in first.backward_products


def test_flops_are_those_that_torch_counts_in_a_real_step() -> None:
    net, batch = Net(), batch_of(3)
    plain = dataless_settings(torch.device("cpu"), keeps_streams=False)  # every product is an operation of its own
    with plain, FlopCounterMode(display=False) as counter:
        loss(net, batch).total.backward()
    assert 3 * trace_of(Net()).flops_per_sample == counter.get_total_flops()


def saved_bytes(net: nn.Module, num_samples: int) -> int:
    """Of a real forward: every storage once, without weights and inputs."""
    batch = batch_of(num_samples)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    held = [*net.parameters(), *net.buffers(), *batch.values()]
    plain = dataless_settings(torch.device("cpu"), keeps_streams=False, fuses_attention=True)
    with plain, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        total = loss(net, batch).total
    found = sum(storage.nbytes() for storage in kept.values())
    own = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert total.requires_grad
    return found - sum(size for address, size in own.items() if address in kept)


def test_activations_are_those_that_a_real_forward_keeps() -> None:
    trace, net = trace_of(Net()), Net()
    fixed = sum(unit.fixed_saved_bytes for unit in trace.units)
    for num_samples in (2, 7):
        assert num_samples * trace.saved_activation_bytes + fixed == saved_bytes(net, num_samples)


def test_a_llama_has_the_flops_of_its_shape() -> None:
    config, length = LlamaConfig(preset="tiny", num_layers=2), 32
    spec = spec_for(config, seq_len=length)
    with torch.device("meta"):
        module = spec.build()
    assert spec.pipeline_spec is not None
    trace = trace_module(
        module,
        lambda number: {"tokens": torch.zeros(number, length + 1, dtype=torch.int64)},
        spec.loss,
        units=spec.pipeline_spec.units,
        blocks=spec.blocks,
    )
    assert trace.flops_per_sample == length * flops_per_token(config.shape(), length)
    assert trace.num_params == num_params(config.shape())
    assert len(list(trace.blocks)) == 2
    assert next(iter(trace.blocks)).attention_flops > 0


def test_nothing_is_changed() -> None:
    net, state = Net(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    trace_of(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


class Chooses(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (2.0 if images.sum() > 0 else 1.0)


class Grows(Net):
    def forward(self, images: Tensor) -> Tensor:
        for _ in range(len(images)):
            images = images @ torch.eye(12)
        return super().forward(images)


@pytest.mark.parametrize(
    ("net", "why"),
    [(Chooses, "its code depends on the values of a tensor"), (Grows, "depends on the number of samples")],
)
def test_what_cannot_be_traced_is_said_and_not_guessed(net: type[nn.Module], why: str) -> None:
    trace = trace_of(net())
    assert len(trace.untraced) == 1
    assert why in trace.untraced[0]
    assert trace.flops_per_sample == 0
    assert trace.num_params == sum(parameter.numel() for parameter in Net().parameters())


@torch.library.custom_op("closeranks_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(twice(images))


def test_an_operation_of_somebody_else_is_named_and_the_rest_is_traced() -> None:
    trace = trace_of(Custom())
    assert trace.untraced == ("The time of the operation closeranks_test::twice is not known.",)
    assert trace.flops_per_sample == trace_of(Net()).flops_per_sample > 0


def test_half_precision_keeps_half_the_activations_and_copies_of_weights() -> None:
    def in_half(net: nn.Module, batch: Any) -> Loss:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(net, batch)

    full, half = trace_of(Net()), trace_of(Net(), in_half)
    assert half.saved_activation_bytes < 0.75 * full.saved_activation_bytes

    def copies(unit: TracedUnit) -> float:
        return unit.fixed_saved_bytes

    assert copies(full.units[0]) == 0
    assert copies(half.units[0]) >= 2 * 2 * 4 * WIDTH * WIDTH

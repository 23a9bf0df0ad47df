"""A small model as a chain, and work for a pipeline, whose results one process can check."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.protocols import Loss
from closeranks.core.seeds import derive_seed

VOCAB, DIM, LENGTH = 11, 6, 3
DEPTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))), 0.3, self.training)


class Toy(nn.Module):
    """Embedding, blocks and head. Its own forward is what one process computes."""

    def __init__(self, depth: int = DEPTH, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("table", torch.arange(3.0))
        if tied:
            self.head.weight = self.embed.weight


class ToyChain:
    def __init__(self, depth: int = DEPTH) -> None:
        self.units = ("embed", *(f"layers.{number}" for number in range(depth)), "head")
        self.costs = (1.0, *(3.0 for _ in range(depth)), 1.5)
        self.seed = 0

    def first_input(self, module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        tokens: Tensor = batch["tokens"]
        return tokens

    def shared_inputs(self, module: nn.Module, batch: Mapping[str, Any]) -> None:
        return None

    def run_unit(self, module: nn.Module, number: int, hidden: Tensor, beside: None = None) -> Tensor:
        torch.default_generator.manual_seed(derive_seed(self.seed, "unit", number))
        output: Tensor = module.get_submodule(self.units[number])(hidden)
        return output

    def loss_from_output(self, module: nn.Module, output: Tensor, batch: Mapping[str, Any]) -> Loss:
        targets = batch["targets"]
        total = F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")
        return Loss(total, float(targets.numel()))


def toy(depth: int = DEPTH, *, tied: bool = False, seed: int = 1) -> Toy:
    torch.manual_seed(seed)
    return Toy(depth, tied=tied).double()


def batches(num_micro: int, size: int = 4, seed: int = 2) -> list[dict[str, Tensor]]:
    """The last one is smaller."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (num_micro - 1) + [size - 1]
    draw = partial(torch.randint, VOCAB, generator=generator)
    return [{"tokens": draw((size, LENGTH)), "targets": draw((size, LENGTH))} for size in sizes]


@dataclass
class ToyWork:
    """Losses by micro-batch, and the order in which gradients were announced."""

    chain: ToyChain
    batches: Sequence[Mapping[str, Tensor]]
    losses: dict[int, float] = field(default_factory=dict)
    backwards: list[tuple[int, bool]] = field(default_factory=list)
    opened: int | None = None

    @property
    def num_micro(self) -> int:
        return len(self.batches)

    def signature(self, micro: int) -> Hashable:
        return len(self.batches[micro]["tokens"])

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def before_forward(self, stage: int, micro: int) -> None:
        self.chain.seed = derive_seed("toy", micro)

    def first_input(self, module: nn.Module, micro: int) -> Tensor:
        return self.chain.first_input(module, self.batches[micro])

    def shared_inputs(self, module: nn.Module, micro: int) -> None:
        return None

    def loss_from_output(self, module: nn.Module, micro: int, output: Tensor) -> Tensor:
        loss = self.chain.loss_from_output(module, output, self.batches[micro])
        self.losses[micro] = loss.total.item()
        return loss.total

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        assert self.opened is None
        self.opened = stage
        self.backwards.append((stage, is_last))

    def end_backward(self, stage: int) -> None:
        assert self.opened == stage
        self.opened = None


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """By name, tied ones under each."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def run_alone(module: nn.Module, chain: ToyChain, given: Sequence[Mapping[str, Tensor]]) -> dict[int, float]:
    """What one process does: forward and backward of each micro-batch, one after the other."""
    work = ToyWork(chain, given)
    for micro in range(work.num_micro):
        work.before_forward(0, micro)
        hidden = work.first_input(module, micro)
        for number in range(len(chain.units)):
            hidden = chain.run_unit(module, number, hidden)
        work.loss_from_output(module, micro, hidden).backward()
    return work.losses

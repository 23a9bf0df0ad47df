"""A backward in two halves against a backward in one, on graphs with everything that makes it hard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from closeranks.parallel.pipeline.split_backward import backward_input, backward_weight, plan_split
from tests.parallel.toy import DIM, Block

Model = Callable[[Tensor], Tensor]


def entrance(seed: int = 0) -> Tensor:
    return torch.randn(3, 2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def parameters(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    draws = (torch.randn(DIM, DIM, dtype=torch.float64, generator=generator) for _ in range(count))
    return [nn.Parameter(draw / DIM**0.5) for draw in draws]


def compare(model: Model, weights: list[nn.Parameter], *, expect_now: int = 0) -> None:
    """Twice each, so that gradients are added to what is there."""
    whole, halves = entrance(), entrance()
    for _ in range(2):
        model(whole).sum().backward()
    expected = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    for turn in range(2):
        output = get_gradient_edge(model(halves).sum())
        plan = plan_split(output, halves)
        rest = backward_input(output, None, halves, plan)
        assert sum(weight.grad is not None for weight in weights) == (expect_now if turn == 0 else len(weights))
        backward_weight(rest)
    assert halves.grad is not None
    torch.testing.assert_close(halves.grad, whole.grad, rtol=0, atol=1e-12)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=1e-12)


def test_blocks_with_norms_biases_and_residuals() -> None:
    blocks = nn.Sequential(Block(), Block()).double().eval()
    compare(blocks, [weight for name, weight in blocks.named_parameters() if not name.endswith("unused")])


def test_a_weight_used_twice_with_another_between() -> None:
    first, second = weights = parameters(2)
    compare(lambda x: torch.tanh(torch.tanh(torch.tanh(x @ first) @ second) @ first), weights)


def test_weights_that_meet_before_they_are_used() -> None:
    left, right, scale = weights = parameters(3)
    compare(lambda x: torch.tanh(torch.tanh(x @ (left * scale)) @ (right * scale)), weights)


def test_a_weight_made_of_several() -> None:
    direction, length = weights = parameters(2)
    compare(lambda x: x @ (length * direction / direction.norm()) + x.exp(), weights)


def test_outputs_of_one_node_that_go_different_ways() -> None:
    (weight,) = weights = parameters(1)
    compare(lambda x: sum((part * number for number, part in enumerate((x @ weight).unbind(1), 2)), x[:, 0]), weights)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=6))
def test_any_graph(layers: list[tuple[int, int]]) -> None:
    """Each layer has one of three weights and adds what some earlier layer gave."""
    weights = parameters(3)

    def model(x: Tensor) -> Tensor:
        outputs = [x]
        for number, back in layers:
            outputs.append(torch.tanh(outputs[-1] @ weights[number]) + outputs[-1 - min(back, len(outputs) - 1)])
        return outputs[-1]

    compare(model, [weights[number] for number in sorted({number for number, _ in layers})])


class Product(torch.autograd.Function):
    """Computes both gradients whatever is asked."""

    num_calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Product.num_calls += 1
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.T, x.flatten(0, 1).T @ gradients[0].flatten(0, 1)


def test_functions_in_python_are_not_run_twice() -> None:
    first, second = weights = parameters(2)
    Product.num_calls = 0
    compare(lambda x: torch.tanh(Product.apply(torch.tanh(x @ first), second)), weights, expect_now=1)
    assert Product.num_calls == 2 + 2


class Named(Product):
    """Notes something under the name of the node's own method, as a user's Function may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.name = "product"
        return Product.forward(ctx, x, weight)


def test_a_function_may_note_a_name() -> None:
    first, second, third = weights = parameters(3)
    model: Model = lambda x: Named.apply(torch.tanh(Named.apply(torch.tanh(x @ first), second)), third)  # noqa: E731
    compare(model, weights, expect_now=2)


def test_a_function_on_a_branch_may_note_a_name() -> None:
    first, second = weights = parameters(2)
    compare(lambda x: torch.tanh(x @ Named.apply(first[None], second)[0]), weights)


def test_recomputed_blocks_come_out_right() -> None:
    first, second = weights = parameters(2)
    block: Model = lambda x: torch.tanh(torch.tanh(x @ first) @ second)  # noqa: E731
    compare(lambda x: checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False), weights)


def test_a_compiled_block_makes_the_first_half_whole() -> None:
    weights = parameters(2)

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ weights[0])

    inner = torch.compile(Inner(), backend="aot_eager")
    compare(lambda x: inner(x) @ weights[1], weights, expect_now=2)


def test_hooks_on_parameters_fire_once_each_and_in_the_second_half() -> None:
    block = Block().double()
    fired: list[nn.Parameter] = []
    for weight in block.parameters():
        weight.register_post_accumulate_grad_hook(fired.append)
    x = entrance()
    output = get_gradient_edge(block(x).sum())
    rest = backward_input(output, None, x, plan_split(output, x))
    assert fired == []
    backward_weight(rest)
    assert len(fired) == len({id(weight) for weight in fired}) == 5


def test_hooks_on_tensors_change_a_gradient_once() -> None:
    first, second = weights = parameters(2)

    def model(x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ first) @ second
        hidden.register_hook(lambda gradient: 3 * gradient)
        return hidden

    compare(model, weights)


def test_without_an_entrance_the_second_half_is_all() -> None:
    (weight,) = parameters(1)
    for x in (None, entrance()):  # nobody waits, or what waits is not read
        weight.grad = None
        output = get_gradient_edge((weight * 2).sum())
        rest = backward_input(output, None, x, plan_split(output, x))
        assert weight.grad is None
        assert x is None or x.grad is None
        backward_weight(rest)
        assert torch.equal(weight.grad, torch.full_like(weight, 2.0))  # type: ignore[arg-type]


def test_an_entrance_that_is_the_output_needs_nothing_more() -> None:
    x = entrance()
    output = get_gradient_edge(x)
    backward_weight(backward_input(output, torch.ones_like(x), x, plan_split(output, x)))
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]


class Saved:
    """What autograd keeps of a tensor, so that it can be seen to be let go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that leads back to its own node would keep both


def test_activations_go_with_the_second_half() -> None:
    """By counting references, without the collector of cycles: memory must not wait for it."""
    block, x, saved = Block().double(), entrance(), weakref.WeakSet[Saved]()

    def pack(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        saved.add(kept)
        return kept

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            output = get_gradient_edge(block(x).sum())
        num_saved = len(saved)
        rest = backward_input(output, None, x, plan_split(output, x))
        del output
        assert 0 < len(saved) <= num_saved
        backward_weight(rest)
        assert len(saved) == 0
    finally:
        gc.enable()

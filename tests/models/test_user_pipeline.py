"""A user's modules in a row: the same numbers on any cut, and one sentence for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, Loss, PipelineSpec, ShardingRule
from closeranks.models.config import TensorEntry
from closeranks.models.user import UserSpec
from closeranks.models.user_pipeline import expand_patterns

STAGES = ("embed", "blocks.*", "head")


class Net(nn.Module):
    """Draws in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss(module: Any, batch: dict[str, Tensor]) -> Loss:
    """Draws before and after the module, and reads an attribute of it."""
    noisy = batch["x"] + 0.1 * torch.randn_like(batch["x"])
    errors = (module(noisy).squeeze(-1) - batch["y"] * module.scale).square()
    total = (errors * torch.rand_like(errors)).sum()
    return Loss(total, weight=float(len(errors)), metrics={"drawn": torch.rand(())})


def batch(count: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(count, 3, generator=generator), "y": torch.randn(count, generator=generator)}


def made(
    stages: tuple[str, ...] = STAGES, function: Callable[..., Any] | None = loss, factory: Any = Net
) -> tuple[UserSpec, nn.Module]:
    spec = UserSpec("mine", factory, loss=function, loss_name="the loss mine", metrics=("drawn",), stages=stages)
    torch.manual_seed(1)
    return spec, spec.build()


def by_stages(chain: PipelineSpec, module: nn.Module, cuts: list[range]) -> Loss:
    """As a pipeline does it: every stage starts from the micro-batch's seed."""
    hidden: Tensor | None = None
    for cut in cuts:
        torch.manual_seed(9)
        hidden = chain.first_input(module, batch()) if hidden is None else hidden
        for number in cut:
            hidden = chain.run_unit(module, number, hidden)
    assert hidden is not None
    return chain.loss_from_output(module, hidden, batch())


def test_units_and_costs_are_known_once_it_is_built() -> None:
    spec = UserSpec("mine", Net, loss=loss, stages=STAGES)
    assert spec.pipeline_spec is not None
    assert spec.pipeline_spec.units == ()
    spec.build()
    assert spec.pipeline_spec.units == ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    assert spec.pipeline_spec.costs == (32.0, 72.0, 72.0, 72.0, 9.0)
    assert UserSpec("mine", Net, loss=loss).pipeline_spec is None


@pytest.mark.parametrize(
    "cuts", [[range(5)], [range(2), range(2, 5)], [range(1), range(1, 3), range(3, 4), range(4, 5)]]
)
def test_any_cut_gives_the_numbers_of_one_process(cuts: list[range]) -> None:
    spec, module = made()
    assert spec.pipeline_spec is not None
    torch.manual_seed(9)
    whole = spec.loss(module, batch())
    whole.total.backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    cut = by_stages(spec.pipeline_spec, module, cuts)
    cut.total.backward()
    assert torch.equal(cut.total, whole.total)
    assert cut.weight == whole.weight == 5
    assert torch.equal(torch.as_tensor(cut.metrics["drawn"]), torch.as_tensor(whole.metrics["drawn"]))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]


def test_the_module_is_the_users_own_again_after_a_loss() -> None:
    spec, module = made()
    called: list[str] = []
    module.register_forward_hook(lambda *_: called.append("hook"))
    spec.loss(module, batch())
    assert "forward" not in vars(module)
    assert called == ["hook"] * 2, "once to compare, once to compute"
    assert all(part.training for part in module.modules())
    spec.loss(module, batch())
    assert called == ["hook"] * 3


def test_successive_losses_draw_anew() -> None:
    spec, module = made()
    torch.manual_seed(3)
    first, second = (spec.loss(module, batch()).total.item() for _ in range(2))
    assert first != second


def test_evaluation_through_the_chain_is_the_modules_own_forward() -> None:
    spec, module = made(function=lambda m, b: Loss(m(b["x"]).sum(), 1.0, {"drawn": 0.0}))
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(spec.loss(module, batch()).total, module(batch()["x"]).sum())


class Between(Net):
    """Does something between its modules that no stage does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


class Pooled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (Between, "the module's own forward and the stages in a row give different numbers"),
        (Pooled, r"the module's own forward gives \[5\] and the stages in a row \[5, 1\]"),
    ],
)
def test_stages_that_are_not_the_forward_are_refused(factory: Any, words: str) -> None:
    spec, module = made(factory=factory)
    with pytest.raises(ModelError, match=words):
        spec.loss(module, batch())


class Paired(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.LSTM(3, 8)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return self.embed(x)


def twice(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]) - module(batch["x"])).mean()


def never(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module.head.weight.sum()


def by_name(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(x=batch["x"]).mean()


def with_batch(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(batch).mean()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (twice, "the loss mine called the module twice, but with model.stages it is called once with one tensor"),
        (never, "the loss mine never called the module"),
        (by_name, r"the loss mine called the module with \(x=\)"),
        (with_batch, r"the loss mine called the module with \(a dict\)"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_on_every_stage(function: Callable[..., Any], words: str) -> None:
    spec, module = made(function=function)
    spec.metrics = ()
    assert spec.pipeline_spec is not None
    output = torch.zeros(5, 1, requires_grad=True)
    with pytest.raises(ModelError, match=words):
        spec.loss(module, batch())
    with pytest.raises(ModelError, match=words):
        spec.pipeline_spec.loss_from_output(module, output, batch())
    if function is not twice:  # caught at its first call, it cannot be seen to make a second
        with pytest.raises(ModelError, match=words):
            spec.pipeline_spec.first_input(module, batch())


def penalty(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["x"]).mean() + sum(p.square().sum() for p in module.parameters())


def stated(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["x"]).mean() + module.state_dict()["head.weight"].sum()


def of_a_unit(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["x"]).mean() + module.embed.weight.square().sum()


def of_some_units(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["x"]).mean() + sum(p.square().sum() for p in module.blocks.parameters())


@pytest.mark.parametrize(
    ("function", "name"),
    [(penalty, "parameters"), (stated, "state_dict"), (of_a_unit, "embed"), (of_some_units, "blocks")],
)
def test_a_loss_that_reads_what_a_stage_does_not_hold_is_refused(function: Callable[..., Any], name: str) -> None:
    spec, module = made(function=function)
    spec.metrics = ()
    assert spec.pipeline_spec is not None
    whole = spec.loss(module, batch())
    assert whole.total.requires_grad
    module.embed = module.blocks[0] = None  # type: ignore[assignment, index]  # as a last stage stands there
    with pytest.raises(ModelError, match=f"the loss mine read '{name}' of the module, of which") as told:
        spec.pipeline_spec.loss_from_output(module, torch.zeros(5, 1, requires_grad=True), batch())
    assert "optim.weight_decay, or use pipeline=1" in str(told.value)


def test_a_loss_may_read_a_unit_that_its_stage_holds() -> None:
    def of_the_head(module: Any, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["x"]).mean() + module.head.weight.square().sum() * module.scale

    spec, module = made(function=of_the_head)
    spec.metrics = ()
    assert spec.pipeline_spec is not None
    module.embed = None  # type: ignore[assignment]  # as a last stage stands there
    loss = spec.pipeline_spec.loss_from_output(module, torch.zeros(5, 1, requires_grad=True), batch())
    assert torch.equal(loss.total, 5 * module.head.weight.square().sum() * 0.5)


def test_an_except_of_the_users_does_not_stop_the_first_stage() -> None:
    def careful(module: Any, batch: dict[str, Tensor]) -> Tensor:
        try:
            return module(2 * batch["x"]).mean()
        except Exception as error:
            raise AssertionError from error

    spec, module = made(function=careful)
    assert spec.pipeline_spec is not None
    assert torch.equal(spec.pipeline_spec.first_input(module, batch()), 2 * batch()["x"])


def test_a_unit_that_returns_no_tensor_is_named() -> None:
    spec, module = made(factory=Paired)
    assert spec.pipeline_spec is not None
    with pytest.raises(ModelError, match="the stage 'embed' returned a tuple, but stages pass on one tensor"):
        spec.pipeline_spec.run_unit(module, 0, batch()["x"])


def test_a_mistake_in_the_loss_is_blamed_as_ever() -> None:
    spec, module = made()
    assert spec.pipeline_spec is not None
    with pytest.raises(ModelError, match="the loss mine raised KeyError: 'x'"):
        spec.pipeline_spec.first_input(module, {"y": torch.zeros(2)})


def test_stages_need_a_loss_apart_from_the_module() -> None:
    with pytest.raises(ModelError, match=r"model.stages needs a separate loss function.*Give model.loss"):
        made(function=None)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (("embed", "blocks.*"), r"parameter 'head.weight' \[1, 8\] is in none of the modules that model.stages names"),
        (
            ("embed", "block.*", "head"),
            r"names 'block.\*', and the model has no such module. Did you mean 'blocks.\*'\?",
        ),
        (("embed", "blocks", "blocks.0", "head"), "names 'blocks.0', which is a part of 'blocks' that it names too"),
    ],
)
def test_stages_that_do_not_fit_the_module_are_refused(stages: tuple[str, ...], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        made(stages)


def test_patterns_stay_within_a_dot_and_keep_the_modules_order() -> None:
    modules = ["embed", "blocks", *[f"blocks.{n}{part}" for n in range(12) for part in ("", ".up")], "head"]
    assert expand_patterns(["embed", "blocks.*", "head"], modules)[1:-1] == tuple(f"blocks.{n}" for n in range(12))
    assert expand_patterns(["blocks.1", "blocks.1"], modules) == ("blocks.1", "blocks.1"), "a unit may run twice"


def test_entries_become_rules_and_crossings() -> None:
    entries = [
        TensorEntry(pattern="blocks.*.up.weight", dim=0),
        TensorEntry(pattern="head.weight", dim=0, whole=True),
        TensorEntry(pattern="blocks.*.norm.*", partial=True),
    ]
    spec = UserSpec("mine", Net, tensor=entries)
    assert spec.sharding_rules == (
        ShardingRule("blocks.*.up.weight", 0),
        ShardingRule("head.weight", 0),
        ShardingRule("blocks.*.norm.*", None, sequence=True),
    )
    assert spec.activation_collectives == (ActivationCollectives("head", on_input="copy", on_output="whole"),)

"""Any module of the user's: what is right passes, what is wrong ends in one sentence with the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError, UserError
from closeranks.core.protocols import ModelSpec
from closeranks.core.tracebacks import display_path
from closeranks.models.build import spec_for
from closeranks.models.config import UserModelConfig
from closeranks.models.user import UserSpec, find_blocks

from . import mistakes

HERE = mistakes.__name__
FILE = display_path(mistakes.__file__)
LINES = Path(mistakes.__file__).read_text().splitlines()


def line_of(text: str) -> str:
    return f"{FILE}:{1 + next(number for number, line in enumerate(LINES) if text in line)}"


def spec_named(factory: str, loss: str = "", **config: object) -> ModelSpec:
    dotted = f"{HERE}:{loss}" if loss else ""
    table = {"name": f"{HERE}:{factory}", "loss": dotted, **config}
    return spec_for(UserModelConfig.model_validate(table), seq_len=0)


def batch(count: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(count, 2, generator=generator), "y": torch.randn(count, generator=generator)}


def test_a_mean_becomes_a_sum_that_adds_up() -> None:
    spec = spec_named("good", "mean_loss", args={"width": 7})
    assert isinstance(spec, ModelSpec)
    assert not spec.builds_on_meta
    module = spec.build()
    assert module[0].out_features == 7  # type: ignore[index]
    whole = spec.loss(module, batch())
    assert whole.weight == 5
    assert whole.total.item() == pytest.approx(5 * mistakes.mean_loss(module, batch()).item())
    parts = [spec.loss(module, {k: v[rows] for k, v in batch().items()}) for rows in (slice(2), slice(2, 5))]
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item())


def test_a_loss_of_ours_passes_through() -> None:
    spec = spec_named("good", "summed_loss", metrics=["hits"])
    loss = spec.loss(spec.build(), batch())
    assert loss.weight == 5
    assert 0 <= int(loss.metrics["hits"]) <= 5


@pytest.mark.parametrize("factory", ["Stacked", "WithLoss"])
def test_without_a_loss_the_module_computes_it(factory: str) -> None:
    spec = spec_named(factory)
    loss = spec.loss(spec.build(), batch())
    loss.total.backward()
    assert loss.weight == 5


def test_callables_work_without_a_job_file() -> None:
    spec = UserSpec("mine", lambda: nn.Linear(2, 1), loss=mistakes.mean_loss, seq_len=32)
    assert spec.loss(spec.build(), batch()).weight == 5
    assert (spec.item, spec.items_per_sample) == ("token", 32)


def test_evaluation_needs_no_graph() -> None:
    spec = spec_named("good", "mean_loss")
    with torch.no_grad():
        assert not spec.loss(spec.build(), batch()).total.requires_grad


def test_blocks_are_the_first_repeated_modules() -> None:
    assert find_blocks(mistakes.Stacked()) == ("layers.0", "layers.1", "layers.2")
    assert find_blocks(mistakes.good()) == ("0", "1", "2")
    assert find_blocks(nn.Linear(2, 2)) == ()
    spec = spec_named("Stacked")
    assert spec.blocks == ()
    spec.build()
    assert spec.blocks == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    ("factory", "args", "words"),
    [
        ("raises", {}, ["raised ValueError: three layers are too many", line_of("raises here")]),
        ("raises_deep", {}, ["raised TypeError", line_of("raises in torch")]),
        ("good", {"wdth": 3}, ["raised TypeError", "'wdth'", line_of("def good")]),
        ("not_a_module", {}, ["returned a dict, not a torch module", line_of("def not_a_module")]),
    ],
)
def test_a_factory_that_fails_is_named_with_its_line(factory: str, args: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        spec_named(factory, args=args).build()
    text = str(caught.value)
    assert "\n" not in text
    for word in [f"the factory {HERE}:{factory}", *words]:
        assert word in text


@pytest.mark.parametrize(
    ("name", "words"), [("BUILT", "already built, not a factory"), ("NUMBER", "is a int, not a factory")]
)
def test_what_is_no_factory_is_refused_before_building(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_named(name)


def test_an_unknown_factory_gets_a_hint() -> None:
    with pytest.raises(UserError, match="Did you mean 'good'"):
        spec_named("goood")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("loss_is_a_float", ["returned a float, not a tensor", "def loss_is_a_float"]),
        ("loss_per_sample", ["returned a tensor of shape [5], not one number", "def loss_per_sample"]),
        ("detached_loss", ["depends on no parameter", "def detached_loss"]),
        ("loss_total_is_a_float", ["whose total is a float", "def loss_total_is_a_float"]),
        ("summed_loss", ["reports the metrics hits, but model.metrics says none", "def summed_loss"]),
        ("key_error_loss", ["raised KeyError: 'features'", "the batch holds x, y", "no such key"]),
    ],
)
def test_a_loss_that_fails_is_named_with_its_line(loss: str, words: list[str]) -> None:
    spec = spec_named("good", loss)
    module = spec.build()
    with pytest.raises(ModelError) as caught:
        spec.loss(module, batch())
    text = str(caught.value)
    *said, source = words
    assert "\n" not in text
    for word in [f"the loss {HERE}:{loss}", *said, line_of(source)]:
        assert word in text


def test_a_failing_module_without_a_loss_is_blamed_on_forward() -> None:
    spec = spec_named("Stacked")
    with pytest.raises(ModelError) as caught:
        spec.loss(spec.build(), {"y": torch.zeros(2)})
    assert f"the loss of {HERE}:Stacked raised KeyError: 'x' ({line_of('hidden = self.head')})" in str(caught.value)


def test_a_fault_of_the_device_passes_untouched() -> None:
    spec = spec_named("good", "device_error_loss")
    module = spec.build()
    with pytest.raises(torch.OutOfMemoryError):
        spec.loss(module, batch())

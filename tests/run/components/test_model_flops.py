"""The FLOPs of a module of one's own in a run: counted once, the same under every layout, and without any effect."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from closeranks.core.events import FlopsCounted, RunStarted, StepDone
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.run.session import Session
from closeranks.telemetry.run_log.run_history import load_history
from closeranks.testing import run_world
from tests.run.small import of_kind, train

TABLE = [{"pattern": "blocks.*.up.weight", "dim": 0}, {"pattern": "blocks.*.down.weight", "dim": 1}]
BY_HAND = 8 * 6 * (3 * 2 * 12 * 20 + 12 * 30)
"""Of a sample of ``own_models``: eight tokens through three blocks and the head."""


class Images(nn.Module):
    """Running statistics, dropout, a cache that its first forward fills, and a count of its calls."""

    cache: dict[int, Tensor] = {}  # noqa: RUF012 (shared by all instances, as such caches are)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        ramp = self.cache.setdefault(image.shape[-1], torch.linspace(0, 1, image.shape[-1]))
        hidden = nn.functional.dropout(self.norm(self.conv(image + ramp)).relu(), 0.3, self.training)
        answers: Tensor = self.head(hidden.flatten(1))
        return answers


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator))


def outcome(folder: Path, *, counts: bool) -> tuple[list[float], dict[str, Tensor]]:
    Images.cache.clear()
    module = Images()
    torch.manual_seed(7)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    train(folder, model=module, data=images(), telemetry={"count_flops": counts}, train={"steps": 6})
    losses = [done.loss for done in of_kind(folder, StepDone)]
    return losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_it_changes_no_bit(tmp_path: Path) -> None:
    losses, state = outcome(tmp_path / "counted", counts=True)
    plain, expected = outcome(tmp_path / "plain", counts=False)
    assert losses == plain
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    (counted,) = of_kind(tmp_path / "counted", FlopsCounted)
    assert counted.flops_per_item == 4 * 8 * 9 * 64 + 6 * 8 * 64 * 10
    assert not of_kind(tmp_path / "plain", FlopsCounted)
    history = load_history(tmp_path / "counted")
    assert history.started is not None
    assert history.started.flops_per_item == counted.flops_per_item


def go(folder: Path, layout: str, model: dict[str, Any], settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    job = load_job(
        None,
        extra={
            "model": {"name": "tests.run.own_models:Net", "loss": "tests.run.own_models:loss", **model},
            "data": {"name": "tests.run.own_models:dataset"},
            "train": {"steps": 2, "global_batch": 8, "micro_batch": 2, **settings},
            "layout": asdict(Layout.parse(layout)),
            "telemetry": {"count_flops": True},
        },
    ).value
    run_session(Session.from_job(job, folder))


@pytest.mark.parametrize(
    ("layout", "num_ranks", "model"),
    [
        ("data=2 zero=3", 2, {}),
        ("tensor=2", 2, {"tensor": TABLE}),
    ],
)
def test_under_every_layout_it_is_that_of_the_whole(
    tmp_path: Path, layout: str, num_ranks: int, model: dict[str, Any]
) -> None:
    run_world(go, num_ranks, tmp_path, layout, model, {})
    (counted,) = of_kind(tmp_path, FlopsCounted)
    assert (counted.flops_per_item, counted.why) == (BY_HAND, "")
    assert not of_kind(tmp_path, FlopsCounted, rank=1)


def test_what_is_recomputed_counts_for_the_hardware_alone(tmp_path: Path) -> None:
    """A block's second forward ends before its last product."""
    go(tmp_path, "data=1", {}, {"recompute": "full"})
    (counted,) = of_kind(tmp_path, FlopsCounted)
    assert (counted.flops_per_item, counted.why) == (BY_HAND, "")
    assert counted.hardware_flops_per_item == BY_HAND + 8 * 3 * 2 * 12 * 20


@pytest.mark.parametrize("precision", ["bf16", "float64"])
def test_in_other_precisions(tmp_path: Path, precision: str) -> None:
    go(tmp_path, "data=1", {}, {"precision": precision})
    assert [one.flops_per_item for one in of_kind(tmp_path, FlopsCounted)] == [BY_HAND]


def reading(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return loss if loss.item() < 1e9 else loss * 2


def test_a_run_that_cannot_be_counted_says_why_and_trains(tmp_path: Path) -> None:
    assert train(tmp_path, loss=reading, telemetry={"count_flops": True}).steps == 4
    (counted,) = of_kind(tmp_path, FlopsCounted)
    assert "depends on the values of a tensor" in counted.why
    assert of_kind(tmp_path, RunStarted)[0].flops_per_item == counted.flops_per_item == 0


def test_a_model_whose_spec_knows_is_not_counted(tmp_path: Path) -> None:
    job = load_job(None, extra={"model": {"name": "digits"}, "data": {"name": "digits"}, "train": {"steps": 1}}).value
    run_session(Session.from_job(job, tmp_path))
    assert of_kind(tmp_path, StepDone)
    assert not of_kind(tmp_path, FlopsCounted)

"""A run goes on under another layout: state is saved in pieces, read in others, and nothing is lost between."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks import Session
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.layout_check import LayoutRecord, compare_records, recorded_losses
from closeranks.run.loop import run_session
from closeranks.run.sample import sample
from closeranks.testing import run_world
from tests.run.small import open_session

pytestmark = pytest.mark.world

TABLES: dict[str, dict[str, Any]] = {
    "model": {
        "name": "llama",
        "dim": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 64,
        "dropout": 0.1,
    },
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 6, "micro_batch": 1, "eval_samples": 1},
    "optim": {"lr": 1e-2, "schedule": {"name": "constant", "warmup": 0}},
}


def go(folder: Path, text: str, steps: int, resume: str = "", precision: str = "float64") -> None:
    """Train to ``steps``; the record is in the folder beside the run."""
    torch.set_num_threads(1)
    layout = Layout.parse(text)
    tables = {
        **TABLES,
        "train": {**TABLES["train"], "steps": steps, "precision": precision},
        "layout": asdict(layout),
        "checkpoint": {"resume": resume},
        # Process-wide, and one process is this one: only where bits are compared, which happens in worlds.
        "run": {"deterministic": precision == "float32"},
    }
    job = load_job(None, extra=tables).value
    run_session(Session.from_job(job, folder / "run", [LayoutRecord(folder)]))


def world(folder: Path, text: str, steps: int, resume: str = "", precision: str = "float64") -> None:
    run_world(go, Layout.parse(text).num_ranks, folder, text, steps, resume, precision, timeout_s=300)


class Channels(nn.Module):
    """Its convolutions lie in memory with the channels last, so that shards of them are boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)])
        self.head = nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 4, 1, 1).expand(-1, 4, 3, 3).contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            image = torch.tanh(conv(image))
        found: torch.Tensor = self.head(image.mean((2, 3)))
        return found


def go_channels(folder: Path, steps: int, zero: int, resume: str) -> dict[str, torch.Tensor]:
    tables = {"train": {"steps": steps}, "layout": {"zero": zero}, "checkpoint": {"resume": resume}}
    session = open_session(folder, model=Channels, optim={"schedule": {"name": "constant", "warmup": 0}}, **tables)
    run_session(session)
    return {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shards_that_are_boxes_are_all_saved(tmp_path: Path, zero: int) -> None:
    whole = run_world(go_channels, 2, tmp_path / "whole", 6, zero, "")
    run_world(go_channels, 2, tmp_path / "first", 4, zero, "")
    resumed = run_world(go_channels, 2, tmp_path / "then", 6, zero, str(tmp_path / "first"))
    for name, tensor in whole[0].items():
        assert torch.equal(tensor, resumed[0][name]), name


JOURNEYS = [
    ("data=2 zero=3", "tensor=2 pipeline=2"),
    pytest.param("tensor=2 pipeline=2", "data=3 zero=1", marks=pytest.mark.slow),
    pytest.param("data=2 zero=2", "data=1", marks=pytest.mark.slow),
    pytest.param("data=1", "data=2 zero=3 tensor=2", marks=pytest.mark.slow),
    ("pipeline=2 schedule=zbv", "data=4 zero=3 shard=2"),
]


@pytest.mark.parametrize(("before", "after"), JOURNEYS)
def test_a_run_goes_on_under_another_layout(tmp_path: Path, before: str, after: str) -> None:
    set_world(World(launcher="testing"))
    go(tmp_path / "through", "data=1", 6)
    world(tmp_path / "first", before, 3)
    world(tmp_path / "second", after, 6, str(tmp_path / "first" / "run"))
    assert recorded_losses(tmp_path / "second") == pytest.approx(recorded_losses(tmp_path / "through")[3:], rel=1e-9)
    weights = compare_records(tmp_path / "second", tmp_path / "through").largest("weight")
    assert weights < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=3 zero=3", "data=3 zero=1", "data=2 tensor=2"])
def test_resumed_under_the_same_layout_is_bit_identical(tmp_path: Path, layout: str) -> None:
    """And repeated: two runs of three steps save the same, and a third that goes on from one equals one of six."""
    world(tmp_path / "through", layout, 6, precision="float32")
    world(tmp_path / "first", layout, 3, precision="float32")
    world(tmp_path / "second", layout, 6, str(tmp_path / "first" / "run"), precision="float32")
    assert recorded_losses(tmp_path / "first") == recorded_losses(tmp_path / "through")[:3]
    assert recorded_losses(tmp_path / "second") == recorded_losses(tmp_path / "through")[3:]
    assert compare_records(tmp_path / "second", tmp_path / "through").largest("weight") == 0.0


def test_a_model_saved_in_pieces_speaks(tmp_path: Path) -> None:
    world(tmp_path, "data=2 zero=3", 2, precision="float32")
    set_world(World(launcher="testing"))
    text = b"".join(sample(tmp_path / "run", "import ", num_tokens=8, temperature=0.8, top_k=0, seed=1))
    assert len(text) == 8

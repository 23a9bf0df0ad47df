"""A job as planning sees it: our models without torch, a user's on the meta device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from closeranks.cli.layout_list import show_layout
from closeranks.core.errors import ConfigError, ModelError
from closeranks.facts.layout import Layout, legal_problems
from closeranks.facts.memory.memory_per_rank import rank_parameters, stages_per_rank, tied_across_ranks
from closeranks.plan.layouts import layout_cost
from closeranks.run.job.describe import ALIGN_BYTES, describe_job
from closeranks.run.job.job import load_job
from closeranks.sync.reducers import sharded
from tests.run.counted import num_params

ROOT = Path(__file__).parents[3]

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

def looks():
    net = Net()
    if net.head.weight.sum().item() > 0: pass
    return net

def data(): return []
"""


def own_job(folder: Path, factory: str) -> Path:
    (folder / "own_planned.py").write_text(OWN)
    job = folder / "job.toml"
    job.write_text(f'[model]\nname = "own_planned:{factory}"\n[data]\nname = "own_planned:data"\n[train]\nsteps = 5\n')
    return job


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_planned", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["tiny", "digits", "pairs", "recommender"])
def test_our_models_are_described_by_their_shapes(name: str) -> None:
    subject = describe_job(load_job(ROOT / "examples" / f"{name}.toml").value)
    assert num_params(subject.structure) > 1000
    cost = layout_cost(subject, Layout(2, zero=3))
    assert cost.fullest.state.total > 0
    assert (subject.llama is not None) == (name == "tiny") == bool(cost.fullest.activations)


def test_a_users_model_is_counted_without_memory(beside: Path) -> None:
    subject = describe_job(load_job(own_job(beside, "Net"), ["model.args.width=16"]).value)
    assert num_params(subject.structure) == 10 * 16 + 3 * (16 * 16 + 16)
    assert [unit.name for unit in subject.structure.units if unit.is_block] == ["blocks.0", "blocks.1", "blocks.2"]
    assert subject.llama is None
    assert layout_cost(subject, Layout(2)).fullest.activations == ()


def test_patterns_are_counted_once_the_model_is_built(beside: Path) -> None:
    job = own_job(beside, "Net")
    stages = 'model.stages=["embed", "blocks.*", "head"]'
    subject = describe_job(load_job(job, [stages, "model.loss=own_planned:data"]).value)
    assert subject.constraints.num_layers == 5
    assert not legal_problems(Layout(pipeline=5), subject.constraints)
    (problem,) = legal_problems(Layout(pipeline=6), subject.constraints)
    assert "5 layers do not fill 6 stages" in problem.what
    with pytest.raises(
        ConfigError, match=r"5 layers do not fill 6 stages.*The nearest legal layout is data=2 pipeline=3"
    ):
        show_layout(job, ["pipeline=6", stages, "model.loss=own_planned:data"], 0, None, per_host=0, as_json=False)


def test_what_cannot_be_built_without_memory_is_told_in_one_sentence(beside: Path) -> None:
    with pytest.raises(ModelError, match=r"own_planned:looks raised .*on the meta device") as told:
        describe_job(load_job(own_job(beside, "looks")).value)
    assert "own_planned.py" in str(told.value)
    assert str(told.value).count(". ") == 1


def test_buckets_are_planned_as_the_reducers_plan_them() -> None:
    assert sharded.ALIGN_BYTES == ALIGN_BYTES
    subject = describe_job(load_job(ROOT / "examples" / "tiny.toml", ["sync.bucket_mib=0.5"]).value)
    for layout in (Layout(3), Layout(3, zero=1), Layout(2, zero=2, tensor=2)):
        everywhere = stages_per_rank(subject.structure, layout)
        (share,) = (
            rank_parameters(stages, tied_across_ranks(everywhere), layout, subject.cost_settings)
            for stages in everywhere
        )
        assert len(share.buckets) >= 5
        assert sum(bucket.numel for bucket in share.buckets) >= share.numel
        assert all(bucket.numel % (layout.data if layout.zero else 1) == 0 for bucket in share.buckets)
        norms = sum(item.numel for item in share.items if item.reduce_axes)
        assert (sum(bucket.numel for bucket in share.buckets if bucket.reduce_axes) >= norms > 0) == (layout.tensor > 1)

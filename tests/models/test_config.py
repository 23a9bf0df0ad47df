"""The table [model]: one of five by its name, checked before anything is built."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from closeranks.facts.layout import Layout, legal_problems
from closeranks.facts.shapes.llama import PRESETS
from closeranks.models.config import (
    DigitsConfig,
    LlamaConfig,
    ModelConfig,
    PairsConfig,
    RecommenderConfig,
    UserModelConfig,
)

ADAPTER: TypeAdapter[Any] = TypeAdapter(ModelConfig)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({}, LlamaConfig),
        ({"preset": "8b"}, LlamaConfig),
        ({"name": "digits", "channels": 4}, DigitsConfig),
        ({"name": "pairs"}, PairsConfig),
        ({"name": "recommender", "top": [8, 4]}, RecommenderConfig),
        ({"name": "pkg.mod:make", "args": {"depth": 3}, "metrics": ["hits"]}, UserModelConfig),
        ({"name": "a:b", "stages": ["x", "y.*"], "tensor": [{"pattern": "x.weight", "dim": 1}]}, UserModelConfig),
    ],
)
def test_the_name_chooses_the_kind(table: dict[str, Any], kind: type) -> None:
    config = ADAPTER.validate_python(table)
    assert type(config) is kind
    assert ADAPTER.validate_python(config) is config
    assert ADAPTER.validate_json(ADAPTER.dump_json(config)) == config


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "lama", "preset": "8b"}, "there is no model 'lama'. Did you mean 'llama'?"),
        ({"preset": "tinny"}, "there is no preset 'tinny'. The presets are tiny, "),
        ({"preset": "tiny", "num_heads": 5}, "dim 128 does not split into 5 heads"),
        ({"preset": "tiny", "depth": 5}, "Extra inputs are not permitted"),
        ({"dropout": 1.0}, "less than 1"),
        ({"name": "pkg:make", "loss": "my_loss"}, "Write package.module:function"),
        ({"name": "digits", "preset": "tiny"}, "Extra inputs are not permitted"),
        ({"name": "pkg:make", "tensor": [{"pattern": "up.weight"}]}, "either a dim, or partial = true"),
        ({"name": "pkg:make", "tensor": [{"pattern": "n", "dim": 0, "partial": True}]}, "either a dim, or partial"),
        ({"name": "pkg:make", "tensor": [{"pattern": "head*", "dim": 0, "whole": True}]}, "ends in '.weight'"),
        ({"name": "pkg:make", "tensor": [{"pattern": "up.weight", "dim": -1}]}, "greater than or equal to 0"),
        ({"name": "pkg:make", "stages": [""]}, "at least 1 character"),
    ],
)
def test_mistakes_are_explained(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(table)
    assert words in str(caught.value)
    assert caught.value.error_count() == 1


def test_overrides_change_the_preset_and_nothing_else() -> None:
    assert LlamaConfig(preset="1b").shape() == PRESETS["1b"]
    shape = LlamaConfig(preset="1b", tied=False, num_layers=2).shape()
    assert (shape.tied, shape.num_layers, shape.dim) == (False, 2, 2048)


def test_demands_let_the_layout_be_judged_before_building() -> None:
    batch = {"seq_len": 64, "global_batch": 8, "micro_batch": 1}
    assert legal_problems(Layout(tensor=8), LlamaConfig(preset="tiny").layout_constraints(**batch)) == ()
    assert legal_problems(Layout(data=8), DigitsConfig().layout_constraints(**batch)) == ()
    assert len(legal_problems(Layout(tensor=2), DigitsConfig().layout_constraints(**batch))) == 1
    assert len(legal_problems(Layout(context=3), LlamaConfig().layout_constraints(**batch))) == 1


def test_a_users_stages_and_table_open_the_axes() -> None:
    batch = {"seq_len": 0, "global_batch": 8, "micro_batch": 1}

    def problems(layout: Layout, **table: Any) -> int:
        return len(legal_problems(layout, UserModelConfig(name="a:b", **table).layout_constraints(**batch)))

    assert problems(Layout(pipeline=3)) == 1
    assert problems(Layout(pipeline=3), stages=("x", "y")) == 1
    assert problems(Layout(pipeline=3), stages=("x", "y", "z")) == 0
    assert problems(Layout(pipeline=3), stages=("x", "y.*")) == 0, "how many there are shows when it is built"
    assert problems(Layout(tensor=3)) == 1
    assert problems(Layout(tensor=3), tensor=({"pattern": "x.weight", "dim": 0},)) == 0


@pytest.mark.parametrize(
    "module", ["closeranks.models.config", "closeranks.facts.shapes.llama", "closeranks.facts.layout"]
)
def test_reading_a_config_imports_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

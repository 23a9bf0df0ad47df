"""What a model is made of, against the modules that are built."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from closeranks.facts.shapes import digits, pairs, recommender
from closeranks.facts.shapes.llama import PRESETS, SHARDING, llama_structure, num_params
from closeranks.facts.shapes.model_structure import ModelStructure, ParameterInfo, distinct_parameters, model_structure
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.spec import LlamaSpec


def num_distinct(found: ModelStructure) -> int:
    """Elements of all its weights, a tied one counted once."""
    return sum(prod(weight.shape) for weight in distinct_parameters(found.units))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_adds_up(preset: str) -> None:
    assert num_distinct(llama_structure(PRESETS[preset], 128)) == num_params(PRESETS[preset])


def test_units_and_rules_are_those_of_the_module() -> None:
    """The same cut and the same split, said once without torch and once beside the module."""
    spec = LlamaSpec(LlamaConfig(preset="tiny"), seq_len=32)
    found = llama_structure(spec.shape, 32)
    assert spec.pipeline_spec is not None
    assert tuple(unit.name for unit in found.units) == spec.pipeline_spec.units
    assert tuple(unit.cost for unit in found.units) == spec.pipeline_spec.costs
    assert tuple(unit.name for unit in found.units if unit.is_block) == spec.blocks
    assert tuple((rule.pattern, rule.dim, rule.sequence) for rule in spec.sharding_rules) == SHARDING
    with torch.device("meta"):
        module = spec.build()
    built = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert {weight.name: weight.shape for weight in distinct_parameters(found.units)} == built


def test_a_tied_weight_stands_in_both_units_under_one_name() -> None:
    found = llama_structure(replace(PRESETS["tiny"], tied=True), 32)
    assert found.units[0].weights == found.units[-1].weights
    assert [weight.name for weight in distinct_parameters(found.units)].count("model.embed_tokens.weight") == 1


def test_weights_outside_all_units_form_the_last_one() -> None:
    shapes = {"stem.weight": (4, 3), "blocks.1.weight": (2,), "blocks.10.weight": (5,), "scale": ()}
    found = model_structure(shapes, units=("blocks.1", "blocks.10"), blocks=("blocks.1", "blocks.10"))
    assert {unit.name: [weight.name for weight in unit.weights] for unit in found.units} == {
        "blocks.1": ["blocks.1.weight"],
        "blocks.10": ["blocks.10.weight"],
        "": ["stem.weight", "scale"],
    }
    assert num_distinct(found) == 12 + 2 + 5 + 1


def test_a_split_weight_has_its_share_of_one_dim() -> None:
    assert [ParameterInfo("w", (6, 4), dim).numel(2) for dim in (None, 0, 1)] == [24, 12, 12]
    assert [ParameterInfo("w", (6, 4), dim).rows(2) for dim in (None, 0, 1)] == [6, 3, 6]
    assert (ParameterInfo("s", ()).numel(2), ParameterInfo("s", ()).rows(2)) == (1, 1)


@pytest.mark.parametrize("facts", [digits, pairs])
def test_units_of_the_small_models_hold_everything(facts: object) -> None:
    shape = digits.DigitsShape() if facts is digits else pairs.PairsShape()
    shapes = facts.parameter_shapes(shape)  # type: ignore[attr-defined]
    found = model_structure(shapes, units=facts.UNITS)  # type: ignore[attr-defined]
    assert all(unit.name for unit in found.units)
    assert num_distinct(found) == sum(map(prod, shapes.values()))


def test_units_of_the_recommender_hold_everything() -> None:
    shape = recommender.RecommenderShape(features=3, rows=7)
    shapes = recommender.parameter_shapes(shape)
    found = model_structure(shapes, units=recommender.units(shape))
    assert [unit.name for unit in found.units] == ["bottom", "tables.0", "tables.1", "tables.2", "top"]
    assert num_distinct(found) == sum(map(prod, shapes.values()))

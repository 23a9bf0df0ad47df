from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import ConfigError
from closeranks.optim.config import GroupConfig, OptimConfig
from closeranks.optim.groups import GroupAssignment, ParameterFacts, ParameterGroup, assign

MODEL = (
    ParameterFacts("embed.weight", (100, 8), aliases=("head.weight",)),
    ParameterFacts("layers.0.proj.weight", (8, 8)),
    ParameterFacts("layers.0.proj.bias", (8,)),
    ParameterFacts("layers.0.norm.weight", (8,)),
    ParameterFacts("layers.1.proj.weight", (8, 8)),
)


def assigned(*groups: dict[str, Any], **keys: Any) -> GroupAssignment:
    return assign(MODEL, OptimConfig(groups=tuple(GroupConfig(**group) for group in groups), **keys))


def test_without_patterns_matrices_decay_and_the_rest_does_not() -> None:
    assert assigned(weight_decay=0.3) == GroupAssignment(
        groups=(
            ParameterGroup(("embed.weight", "layers.0.proj.weight", "layers.1.proj.weight"), 1.0, 0.3),
            ParameterGroup(("layers.0.proj.bias", "layers.0.norm.weight"), 1.0, 0.0),
        ),
        frozen=(),
    )


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("proj.weight", (4, 4), True),
        ("scale", (4,), False),
        ("temperature", (), False),
        ("attn.bias", (4, 4), False),
        ("attn.rel_bias", (4, 4), False),
        ("bias", (4, 4), False),
        ("norm.weight", (4, 4), False),
        ("block.layernorm2.weight", (4, 4), False),
        ("final_norm.weight", (4, 4), False),
        ("norm_proj.weight", (4, 4), True),
        ("normalizer.proj.weight", (4, 4), True),
        ("debiased.weight", (4, 4), True),
    ],
)
def test_what_decays(name: str, shape: tuple[int, ...], decays: bool) -> None:
    assert ParameterFacts(name, shape).decays is decays


def test_patterns_set_rate_and_decay() -> None:
    found = assigned({"pattern": "layers.0.*", "lr_scale": 0.5, "weight_decay": 0.2}, weight_decay=0.1)
    assert found.groups == (
        ParameterGroup(("embed.weight", "layers.1.proj.weight"), 1.0, 0.1),
        ParameterGroup(("layers.0.proj.weight", "layers.0.proj.bias", "layers.0.norm.weight"), 0.5, 0.2),
    )


def test_a_rate_alone_leaves_decay_as_it_was() -> None:
    found = assigned({"pattern": "layers.0.*", "lr_scale": 0.5}, weight_decay=0.1)
    assert ParameterGroup(("layers.0.proj.weight",), 0.5, 0.1) in found.groups
    assert ParameterGroup(("layers.0.proj.bias", "layers.0.norm.weight"), 0.5, 0.0) in found.groups


def test_the_first_pattern_wins() -> None:
    found = assigned({"pattern": "layers.1.*"}, {"pattern": "*", "frozen": True})
    assert found.groups == (ParameterGroup(("layers.1.proj.weight",), 1.0, 0.1),)
    assert len(found.frozen) == 4


def test_a_tied_parameter_answers_to_both_names() -> None:
    found = assigned({"pattern": "head.*", "frozen": True})
    assert found.frozen == ("embed.weight",)


def test_patterns_without_effect_are_all_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        assigned({"pattern": "layers.0.proj.wight"}, {"pattern": "layers.*"}, {"pattern": "layers.1.*"})
    first, second = caught.value.problems
    assert first.place == "optim.groups.0.pattern"
    assert "matches no parameter" in first.what
    assert first.fix == "Did you mean 'layers.0.proj.weight'?"
    assert second.place == "optim.groups.2.pattern"
    assert "earlier patterns take" in second.what
    assert second.fix


def test_a_pattern_far_from_every_name_shows_some() -> None:
    many = [ParameterFacts(f"layers.{number}.weight", (2, 2)) for number in range(300)]
    with pytest.raises(ConfigError) as caught:
        assign(many, OptimConfig(groups=(GroupConfig(pattern="zzz"),)))
    (problem,) = caught.value.problems
    assert problem.fix.startswith("Names are like layers.0.weight")
    assert len(problem.fix) < 200


@given(st.lists(st.sampled_from(["*", "layers.*", "*.bias", "embed.*", "*.1.*", "*norm*"]), max_size=4), st.data())
def test_every_parameter_is_in_exactly_one_place(patterns: list[str], data: st.DataObject) -> None:
    groups = tuple(
        GroupConfig(pattern=pattern, lr_scale=data.draw(st.floats(0, 2)), frozen=data.draw(st.booleans()))
        for pattern in patterns
    )
    try:
        found = assign(MODEL, OptimConfig(groups=groups))
    except ConfigError:
        return
    placed = [name for group in found.groups for name in group.names] + list(found.frozen)
    assert sorted(placed) == sorted(facts.name for facts in MODEL)
    assert len({(group.lr_scale, group.weight_decay) for group in found.groups}) == len(found.groups)

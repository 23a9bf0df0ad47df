"""Plans of a split, without a process or a tensor: what follows from a table, and every way it can be refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, ShardingRule
from closeranks.parallel.tensor.sharding_plan import ParameterEntry, ParameterSharding, ShardingPlan, plan_sharding


def linear(name: str, num_out: int, num_in: int, *, bias: bool = False, is_plain: bool = True) -> list[ParameterEntry]:
    weight = ParameterEntry(f"{name}.weight", (num_out, num_in), "linear", "Linear", is_plain, has_bias=bias)
    return [weight, replace(weight, name=f"{name}.bias", shape=(num_out,))] if bias else [weight]


EMBED = ParameterEntry("embed.weight", (20, 8), "embedding", "Embedding")
HEAD = linear("head", 20, 8)
BLOCK = [*linear("blocks.0.up", 16, 8, bias=True), *linear("blocks.0.down", 8, 16, bias=True)]
CONV = ParameterEntry("stem.weight", (8, 3, 3, 3), "fixed", "Conv2d")
SCALE = ParameterEntry("blocks.0.scale", (4,), "own", "Block")
MODEL = [EMBED, CONV, *BLOCK, SCALE, *HEAD]
MODULES = ["", "embed", "stem", "blocks", "blocks.0", "blocks.0.up", "blocks.0.down", "head"]
UP, DOWN = ShardingRule("blocks.*.up.weight", 0), ShardingRule("blocks.*.down.weight", 1)


def planned(
    *rules: ShardingRule,
    activation_collectives: tuple[ActivationCollectives, ...] = (),
    model: list[ParameterEntry] = MODEL,
) -> ShardingPlan:
    return plan_sharding(model, MODULES, rules, activation_collectives, 4)


def test_a_pair_of_entries_is_all_a_feed_forward_needs() -> None:
    found = planned(UP, DOWN)
    assert found.shardings["blocks.0.up.weight"] == ParameterSharding(0)
    assert found.shardings["blocks.0.up.bias"] == ParameterSharding(0), "it follows its weight"
    assert found.shardings["blocks.0.down.weight"] == ParameterSharding(1)
    assert found.shardings["blocks.0.down.bias"] == found.shardings["head.weight"] == ParameterSharding()
    assert found.activation_collectives == {
        "blocks.0.up": ActivationCollectives("blocks.0.up", on_input="copy"),
        "blocks.0.down": ActivationCollectives("blocks.0.down", on_output="sum"),
    }


def test_a_crossing_around_split_modules_is_the_only_one() -> None:
    model = [*linear("blocks.0.up", 16, 8), *linear("blocks.0.down", 8, 16)]
    around = ActivationCollectives("blocks.*", on_input="gather", on_output="scatter")
    modules = ["", "blocks.0", "blocks.0.up", "blocks.0.down"]
    found = plan_sharding(model, modules, (UP, DOWN), (replace(around, pattern="blocks.?"),), 4)
    assert list(found.activation_collectives) == ["blocks.0"]
    assert found.activation_collectives["blocks.0"].on_input == "gather"


def test_embeddings_and_own_parameters_split_too() -> None:
    rules = (ShardingRule("embed.weight", 0), ShardingRule("blocks.*.scale", 0), UP, DOWN)
    found = planned(*rules)
    assert found.shardings["embed.weight"] == found.shardings["blocks.0.scale"] == ParameterSharding(0)
    assert found.activation_collectives["embed"] == ActivationCollectives("embed", on_output="sum")
    by_columns = planned(
        ShardingRule("embed.weight", 1), activation_collectives=(ActivationCollectives("embed", on_output="whole"),)
    )
    assert by_columns.activation_collectives == {"embed": ActivationCollectives("embed", on_output="whole")}


def test_the_first_match_counts_and_sequence_means_partial() -> None:
    rules = (ShardingRule("blocks.0.scale", None, sequence=True), ShardingRule("blocks.*.scale", 0))
    one, other = SCALE, replace(SCALE, name="blocks.1.scale")
    found = plan_sharding([one, other], MODULES, rules, (), 4)
    assert found.shardings == {
        "blocks.0.scale": ParameterSharding(None, is_partial=True),
        "blocks.1.scale": ParameterSharding(0),
    }


def test_a_bias_on_a_share_of_the_sequence_is_partial() -> None:
    found = planned(UP, DOWN, activation_collectives=(ActivationCollectives("blocks.*.down", on_output="scatter"),))
    assert found.shardings["blocks.0.down.bias"] == ParameterSharding(None, is_partial=True)
    assert found.shardings["blocks.0.up.bias"] == ParameterSharding(0)


def tied(dim: int | None) -> tuple[list[ParameterEntry], tuple[ShardingRule, ...]]:
    model = [EMBED, replace(HEAD[0], tied_to="embed.weight")]
    rules = [ShardingRule("embed.weight", 0)]
    return model, (*rules, ShardingRule("head.weight", dim)) if dim is not None else tuple(rules)


def test_tied_names_agree() -> None:
    model, rules = tied(0)
    found = planned(
        *rules, activation_collectives=(ActivationCollectives("head", on_input="copy", on_output="whole"),), model=model
    )
    assert found.shardings == {"embed.weight": ParameterSharding(0), "head.weight": ParameterSharding(0)}


@pytest.mark.parametrize("dim", [None, 1])
def test_tied_names_that_disagree_are_refused(dim: int | None) -> None:
    model, rules = tied(dim)
    with pytest.raises(ModelError) as caught:
        planned(*rules, model=model)
    words = {None: "'head.weight' not at all", 1: "'head.weight' along dim 1"}
    assert f"one tensor [20, 8] is split in two ways: 'embed.weight' along dim 0, {words[dim]}" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ((ShardingRule("blocks.*.upp.weight", 0),), "'blocks.*.upp.weight' matches nothing in the model. Did you mean"),
        ((ShardingRule("blocks.*.upp.weight", 0),), "'blocks.*.up.weight'?"),
        ((UP, ShardingRule("blocks.0.up.weight", 0)), "'blocks.0.up.weight' matches only what earlier entries"),
        ((ShardingRule("head.weight", 2),), "'head.weight' [20, 8] has no dim 2 to split along. Its dims are 0, 1"),
        ((ShardingRule("stem.weight", 0),), "'stem.weight' [8, 3, 3, 3] belongs to a Conv2d, which cannot be split"),
        ((UP, ShardingRule("blocks.*.down.*", 0)), "'blocks.0.up.weight' [16, 8] splits its outputs, and nothing"),
        ((ShardingRule("embed.weight", 1),), "'embed.weight' [20, 8] splits its outputs, and nothing"),
        (
            (UP, ShardingRule("blocks.*.down.bias", 0), DOWN),
            "the bias 'blocks.0.down.bias' [8] is to be split along dim 0",
        ),
        ((ShardingRule("head.weight", 0), UP, DOWN), "'head.weight' [20, 8] splits its outputs, and nothing after it"),
    ],
)
def test_what_cannot_be_split_is_refused_with_name_and_shape(rules: tuple[ShardingRule, ...], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        planned(*rules)
    assert words in str(caught.value)
    assert caught.value.fix


def test_shares_are_equal_or_refused() -> None:
    with pytest.raises(ModelError) as caught:
        plan_sharding(MODEL, MODULES, (UP, DOWN), (), 3)
    text = (
        "dim 0 of 'blocks.0.up.weight' [16, 8] does not split into 3 equal shares. Use a layout.tensor that divides 16"
    )
    assert text in str(caught.value)


def test_a_crossing_that_names_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'haed' matches nothing in the model. Did you mean 'head'\?"):
        planned(UP, DOWN, activation_collectives=(ActivationCollectives("haed", on_output="whole"),))


def test_modules_with_a_forward_of_their_own_are_not_computed_in_their_place() -> None:
    own_embed = replace(EMBED, is_plain=False, label="Hashed")
    with pytest.raises(ModelError, match="belongs to a Hashed with a forward of its own"):
        planned(ShardingRule("embed.weight", 0), model=[own_embed])
    own_linear = linear("blocks.0.down", 8, 16, bias=True, is_plain=False)
    with pytest.raises(ModelError, match="with a forward of its own"):
        planned(DOWN, model=own_linear)
    assert planned(DOWN, model=linear("blocks.0.down", 8, 16, is_plain=False)).shardings == {
        "blocks.0.down.weight": ParameterSharding(1)
    }


def test_a_bias_inside_a_crossing_would_be_added_by_every_rank() -> None:
    with pytest.raises(ModelError, match="the bias beside it would be added once by every rank"):
        plan_sharding(
            BLOCK, MODULES, (UP, DOWN), (ActivationCollectives("blocks.0", on_input="copy", on_output="sum"),), 4
        )


def test_a_reader_later_in_the_model_or_beside_is_enough() -> None:
    later = [*linear("ups.0", 16, 8), *linear("downs.0", 8, 16)]
    rules = (ShardingRule("ups.*", 0), ShardingRule("downs.*", 1))
    assert plan_sharding(later, [""], rules, (), 4).activation_collectives.keys() == {"ups.0", "downs.0"}
    beside = [*linear("block.down", 8, 16), *linear("block.up", 16, 8)]
    rules = (ShardingRule("*.up.*", 0), ShardingRule("*.down.*", 1))
    assert plan_sharding(beside, [""], rules, (), 4).activation_collectives.keys() == {"block.up", "block.down"}

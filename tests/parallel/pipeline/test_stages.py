"""Cutting a model into stages: names, objects and memory stay; what cannot be cut is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.facts.layout import Layout
from closeranks.parallel.pipeline.stages import TiedParameter, split_into_stages, stage_ranges, tied_across_stages
from tests.parallel.toy import DEPTH, Toy, ToyChain, batches, run_alone, toy

CHAIN = ToyChain()


def ranges_of(num_stages: int, num_units: int = DEPTH + 2) -> list[range]:
    cuts = [number * num_units // num_stages for number in range(num_stages + 1)]
    return [range(first, last) for first, last in pairwise(cuts)]


def test_ranges_cover_all_units_in_order() -> None:
    ranges = stage_ranges(CHAIN.costs, Layout(pipeline=2, schedule="zbv"))
    assert len(ranges) == 4
    assert [number for own in ranges for number in own] == list(range(DEPTH + 2))
    assert max(sum(CHAIN.costs[n] for n in own) for own in ranges) < sum(CHAIN.costs) / 2
    assert stage_ranges(CHAIN.costs, Layout()) == (range(DEPTH + 2),)


def test_stages_part_the_parameters_and_keep_their_names_and_objects() -> None:
    whole = toy()
    rank_stages = split_into_stages(whole, CHAIN, ranges_of(4), range(4))
    parts = [dict(stage.named_parameters()) for stage in rank_stages.stages.values()]
    assert all(type(stage) is Toy for stage in rank_stages.stages.values())
    assert sum(map(len, parts)) == len(list(whole.parameters()))
    for name, parameter in whole.named_parameters():
        assert sum(part.get(name) is parameter for part in parts) == 1
    assert [name for name in parts[1] if name.endswith("up.bias")] == [
        "layers.1.up.bias",
        "layers.2.up.bias",
        "layers.3.up.bias",
    ]
    assert all("table" in dict(stage.named_buffers()) for stage in rank_stages.stages.values())
    assert rank_stages.ties == ()


def test_the_whole_module_is_left_as_it_was() -> None:
    whole = toy()
    names = [name for name, _ in whole.named_parameters()]
    rank_stages = split_into_stages(whole, CHAIN, ranges_of(2), [0])
    rank_stages.stages[0].register_forward_hook(lambda module, given, output: output)
    assert [name for name, _ in whole.named_parameters()] == names
    assert len(whole._forward_hooks) == 0
    assert len(whole.layers) == DEPTH


def test_stages_in_a_row_compute_what_the_whole_does() -> None:
    chain, (batch,) = ToyChain(), batches(1)
    hidden: Tensor = batch["tokens"]
    chain.seed = 7
    for stage in split_into_stages(toy(), chain, ranges_of(5), range(5)).stages.values():
        hidden = stage(hidden)
    expected, whole = batch["tokens"], toy()
    for number in range(len(chain.units)):
        expected = chain.run_unit(whole, number, expected)
    assert torch.equal(hidden, expected)


def test_hooks_on_a_stage_run_around_its_units() -> None:
    stages = split_into_stages(toy(), CHAIN, ranges_of(2), range(2)).stages
    seen: list[int] = []
    stages[1].register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[0]))
    stages[1](torch.zeros(5, 3, 6, dtype=torch.float64))
    stages[0](batches(1)[0]["tokens"])
    assert seen == [5]


def test_a_module_on_meta_is_cut_without_memory() -> None:
    with torch.device("meta"):
        whole = Toy()
    stages = split_into_stages(whole, CHAIN, ranges_of(2), [1]).stages
    assert list(stages) == [1]
    assert all(parameter.is_meta for parameter in stages[1].parameters())
    assert "embed.weight" not in dict(stages[1].named_parameters())


def test_a_rank_lets_go_of_what_it_does_not_keep() -> None:
    whole = toy()
    dropped, kept = whole.layers[0].up.weight.data_ptr(), whole.layers[7].up.weight.data_ptr()
    stages = split_into_stages(whole, CHAIN, ranges_of(2), [1]).stages
    pointers = {parameter.data_ptr() for parameter in stages[1].parameters()}
    assert kept in pointers
    assert dropped not in pointers
    assert not any(isinstance(value, nn.Module) for value in vars(stages[1]).values())


def test_a_tie_is_told_with_its_stages_on_every_rank() -> None:
    expected = (TiedParameter("embed.weight", ("head.weight",), (0, 3)),)
    for mine in ([0, 3], [1, 2]):
        assert split_into_stages(toy(tied=True), CHAIN, ranges_of(4), mine).ties == expected
    assert tied_across_stages(toy(tied=True), CHAIN.units, [range(DEPTH + 2)]) == ()  # one stage holds both ends


def test_both_ends_of_a_tie_on_one_rank_are_one_parameter() -> None:
    stages = split_into_stages(toy(tied=True), CHAIN, ranges_of(4), [3, 0]).stages
    assert list(stages) == [0, 3]
    assert stages[0].get_parameter("embed.weight") is stages[3].get_parameter("head.weight")


class Shared(nn.Module):
    """One module runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(2, 2), nn.Linear(2, 2)


def test_a_unit_that_runs_twice_stands_in_both_stages() -> None:
    chain = ToyChain(0)
    chain.units = ("twice", "once", "twice")
    rank_stages = split_into_stages(Shared(), chain, [range(2), range(2, 3)], [0, 1])
    assert {tie.name: (tie.aliases, tie.stages) for tie in rank_stages.ties} == {
        "twice.weight": ((), (0, 1)),
        "twice.bias": ((), (0, 1)),
    }
    assert rank_stages.stages[0].twice is rank_stages.stages[1].twice
    assert rank_stages.stages[1].once is None


def test_a_parameter_outside_all_units_is_refused_by_name() -> None:
    whole = toy()
    whole.layers.register_parameter("gain", nn.Parameter(torch.ones(1)))
    with pytest.raises(ModelError, match=r"'layers\.gain' belongs to no unit"):
        split_into_stages(whole, CHAIN, ranges_of(2), [0])


def test_an_alias_outside_all_units_is_refused_too() -> None:
    whole = toy()
    whole.shortcut = whole.embed.weight
    with pytest.raises(ModelError, match="'shortcut' belongs to no unit"):
        split_into_stages(whole, CHAIN, ranges_of(2), [0])


def test_units_within_units_are_refused() -> None:
    chain = ToyChain(1)
    chain.units = ("embed", "layers", "layers.0", "head")
    with pytest.raises(ModelError, match=r"'layers\.0' of the model's chain is inside unit 'layers'"):
        split_into_stages(toy(1), chain, [range(2), range(2, 4)], [0])


def test_a_stage_trains_like_a_part_of_the_whole() -> None:
    """The reference that the pipeline's tests compare with is itself the spec's forward."""
    alone, chain = toy(), ToyChain()
    losses = run_alone(alone, chain, batches(2))
    assert set(losses) == {0, 1}
    assert alone.embed.weight.grad is not None

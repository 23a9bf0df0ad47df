"""Which choices a search tries: all legal, whole clusters, tensor inside a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.layout import Layout, LayoutConstraints, legal_problems
from closeranks.plan.search.space import SearchSpace, candidate_choices, complexity, planned_only
from closeranks.plan.step_time.workload import PlanChoice

NEEDS = LayoutConstraints(
    global_batch=64,
    micro_batch=1,
    num_heads=32,
    num_kv_heads=8,
    num_layers=16,
    vocab_size=1024,
    ffn_dim=256,
    seq_len=64,
)
PLAIN = PlanChoice(Layout())


def choices(num_devices: int, per_host: int = 8, **changes: object) -> list[PlanChoice]:
    space = replace(SearchSpace(), **changes)  # type: ignore[arg-type]
    return list(candidate_choices(space, NEEDS, PLAIN, num_devices, per_host))


def test_every_choice_is_legal_and_takes_all_devices() -> None:
    found = choices(32)
    assert len(found) == len(set(found)) > 500
    for choice in found:
        assert choice.layout.num_ranks == 32
        assert not legal_problems(choice.layout, replace(NEEDS, micro_batch=choice.micro_batch))


def test_every_axis_and_setting_is_tried() -> None:
    found = choices(32)
    assert {choice.layout.tensor for choice in found} == {1, 2, 4, 8}
    assert {choice.layout.pipeline for choice in found} == {1, 2, 4, 8, 16}
    assert {choice.layout.zero for choice in found} == {0, 1, 2, 3}
    assert {choice.layout.shard for choice in found} == {0, 2, 4, 8}
    assert {choice.layout.schedule for choice in found} == {"1f1b", "interleaved-1f1b", "zbv"}
    assert {choice.recompute for choice in found} == {"none", "selective", "full"}
    assert {choice.micro_batch for choice in found} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(("num_devices", "per_host", "most"), [(64, 4, 4), (24, 12, 4), (2, 8, 2), (64, 72, 8)])
def test_tensor_stays_inside_a_host(num_devices: int, per_host: int, most: int) -> None:
    assert max(choice.layout.tensor for choice in choices(num_devices, per_host)) == most


def test_what_is_kept_is_not_varied() -> None:
    layout = Layout(4, tensor=2, pipeline=4)
    found = choices(32, layout=layout, micro_batches=(2,), recompute=("full",))
    assert [(one.layout, one.micro_batch, one.recompute) for one in found] == [(layout, 2, "full")]
    assert choices(64, layout=layout) == []
    assert {one.layout.zero for one in choices(8, zero_stages=(2,)) if one.layout.data > 1} == {2}


def test_more_moving_parts_are_more_complex() -> None:
    plain = PlanChoice(Layout(8), compiled=False)
    steps = [
        plain,
        replace(plain, layout=Layout(8, zero=1)),
        replace(plain, layout=Layout(8, zero=3)),
        replace(plain, layout=Layout(8, zero=3, shard=4)),
        replace(plain, layout=Layout(4, zero=3, shard=2, tensor=2)),
        replace(plain, layout=Layout(2, zero=3, tensor=2, pipeline=2, schedule="zbv")),
    ]
    points = [complexity(choice) for choice in steps]
    assert points == sorted(set(points))
    assert complexity(replace(plain, recompute="full", compiled=True)) == complexity(plain) + 2


def test_what_is_planned_only_is_named() -> None:
    choice = PlanChoice(Layout(2, context=2), precision="fp8", offload=True)
    assert planned_only(choice) == ("context=2", "offload", "fp8")
    assert planned_only(PlanChoice(Layout(2, pipeline=2, schedule="zbv"), virtual_stages=2)) == ()
    assert planned_only(PlanChoice(Layout(2, pipeline=2), virtual_stages=3)) == ("3 virtual stages",)


def test_nothing_that_this_version_does_not_train_is_tried() -> None:
    """So no job file that a search writes can hold it."""
    assert all(planned_only(choice) == () for choice in choices(32))

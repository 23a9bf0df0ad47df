"""Pipelines against one process: every schedule, in float64, with dropout and a smaller last micro-batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.pipeline.programs import PipelineInstruction, program_for
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.stages import V_SHAPED, stage_placement
from closeranks.facts.pipeline.timeline import peak_in_flight
from closeranks.parallel.pipeline.executor import Pipeline, last_gradients, open_pipeline
from closeranks.parallel.pipeline.stages import split_into_stages, stage_ranges
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import WorldError, run_world
from tests.parallel.messages import Traffic, counted
from tests.parallel.toy import DEPTH, DIM, LENGTH, Toy, ToyChain, ToyWork, batches, gradients, run_alone, toy

MICROS = (1, 3, 4, 6)
CPU = torch.device("cpu")
Prepare = Callable[[Toy], None]


def leave(module: Toy) -> None:
    """Nothing is changed."""


@dataclass(frozen=True)
class Told:
    """What a rank has to say about a run."""

    gradients: Mapping[str, Tensor]
    losses: Mapping[int, float]
    most_held: int
    forward: Traffic
    backward: Traffic
    backwards: Sequence[tuple[int, bool]]


def built(
    schedule: str, prepare: Prepare = leave, *, tied: bool = False, splits: bool = True
) -> tuple[Pipeline, ToyChain]:
    """This rank's stages of a pipeline over all ranks, from the same weights everywhere."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole, chain = toy(tied=tied), ToyChain()
    prepare(whole)
    mine = stage_placement(schedule, size)[rank]
    # Not a layout's ranges, so that one rank may have several stages too.
    num_stages = size * SCHEDULES[schedule]
    ranges = stage_ranges(chain.costs, Layout(pipeline=num_stages))
    rank_stages = split_into_stages(whole, chain, ranges, mine)
    pipeline = Pipeline(
        partial(program_for, schedule, size), rank_stages.stages, RankGroup(rank, size), CPU, splits=splits
    )
    return pipeline, chain


def train(schedule: str, num_micro: int, prepare: Prepare = leave, **options: bool) -> Told:
    pipeline, chain = built(schedule, prepare, **options)
    work = ToyWork(chain, batches(num_micro))
    with counted() as sent:
        pipeline.run(work)
    found = {name: gradient for stage in pipeline.stages.values() for name, gradient in gradients(stage).items()}
    return Told(found, work.losses, pipeline.peak_held, sent.forward, sent.backward, work.backwards)


def train_all(cases: Iterable[tuple[str, int]], prepare: Prepare = leave, **options: bool) -> dict[Any, Told]:
    """Many runs in one world: starting one takes longer than running in it."""
    return {case: train(*case, prepare, **options) for case in cases}


def alone(
    num_micro: int, prepare: Prepare = leave, *, tied: bool = False
) -> tuple[dict[str, Tensor], dict[int, float]]:
    whole = toy(tied=tied)
    prepare(whole)
    losses = run_alone(whole, ToyChain(), batches(num_micro))
    return gradients(whole), losses


def assert_alike(told: Sequence[Told], expected: Mapping[str, Tensor], losses: Mapping[int, float]) -> None:
    found = {name: gradient for one in told for name, gradient in one.gradients.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)
    assert {micro: loss for one in told for micro, loss in one.losses.items()} == pytest.approx(losses, abs=1e-12)


def cases(*schedules: str) -> list[tuple[str, int]]:
    return [(schedule, num_micro) for schedule in schedules or SCHEDULES for num_micro in MICROS]


@pytest.mark.world
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_gives_the_gradients_of_one_process(num_ranks: int) -> None:
    told = run_world(train_all, num_ranks, cases(), timeout_s=300.0)
    for schedule, num_micro in cases():
        ranks = [one[schedule, num_micro] for one in told]
        assert_alike(ranks, *alone(num_micro))
        expected = peak_in_flight(schedule_for(schedule, num_ranks, num_micro))
        assert tuple(one.most_held for one in ranks) == expected
        assert_bytes(ranks, num_ranks, schedule, num_micro)
        for one in ranks:  # each stage is told once that its gradients are complete, and after all others of its
            for stage in {stage for stage, _ in one.backwards}:
                assert [is_last for other, is_last in one.backwards if other == stage] == [False] * (num_micro - 1) + [
                    True
                ]


def assert_bytes(ranks: Sequence[Told], num_ranks: int, schedule: str, num_micro: int) -> None:
    """A boundary between ranks takes each sample's hidden state there and its gradient back."""
    rank_of = {stage: rank for rank, own in enumerate(stage_placement(schedule, num_ranks)) for stage in own}
    num_samples = sum(len(batch["tokens"]) for batch in batches(num_micro))
    for rank, told in enumerate(ranks):
        onward = sum(rank_of[s] == rank != rank_of.get(s + 1, rank) for s in rank_of)
        back = sum(rank_of[s] == rank != rank_of.get(s - 1, rank) for s in rank_of)
        for traffic, boundaries in ((told.forward, onward), (told.backward, back)):
            assert traffic.num_sent == boundaries * num_micro
            assert traffic.sent_bytes == boundaries * num_samples * LENGTH * DIM * 8


def train_unsplit(given: Iterable[tuple[str, int]]) -> dict[Any, Told]:
    return train_all(given, splits=False)


@pytest.mark.world
def test_a_first_half_that_is_all_gives_the_same_and_holds_less() -> None:
    given = cases("zbv", "dualpipev")
    told = run_world(train_unsplit, 2, given)
    for schedule, num_micro in given:
        ranks = [one[schedule, num_micro] for one in told]
        assert_alike(ranks, *alone(num_micro))
        bounds = peak_in_flight(schedule_for(schedule, 2, num_micro))
        assert all(one.most_held <= bound for one, bound in zip(ranks, bounds, strict=True))
        for one in ranks:
            assert [is_last for stage, is_last in one.backwards if stage == 0] == [False] * (num_micro - 1) + [True]


def freeze_first_units(module: Toy) -> None:
    for part in (module.embed, module.layers[0], module.layers[1], module.layers[2], module.layers[3]):
        part.requires_grad_(False)


def freeze_a_middle_unit(module: Toy) -> None:
    module.layers[4].requires_grad_(False)


@pytest.mark.world
def test_frozen_units_send_no_gradients_where_nobody_learns() -> None:
    given = cases("1f1b", "zbv", "interleaved-zero-bubble")
    told = run_world(train_all, 2, given, freeze_first_units)
    for case in given:
        assert_alike([one[case] for one in told], *alone(case[1], freeze_first_units))
    assert [one["1f1b", 4].backward.num_sent for one in told] == [0, 0]
    assert [one["1f1b", 4].forward.num_sent for one in told] == [4, 0]


@pytest.mark.world
def test_a_frozen_unit_in_the_middle_lets_gradients_through() -> None:
    given = cases("1f1b", "dualpipev")
    told = run_world(train_all, 2, given, freeze_a_middle_unit)
    for case in given:
        assert_alike([one[case] for one in told], *alone(case[1], freeze_a_middle_unit))


def train_tied(schedule: str, num_micro: int) -> Told:
    return train(schedule, num_micro, tied=True)


@pytest.mark.world
def test_the_ends_of_a_tie_add_up() -> None:
    first, last = run_world(train_tied, 2, "1f1b", 4)
    expected, _ = alone(4, tied=True)
    total = first.gradients["embed.weight"] + last.gradients["head.weight"]
    torch.testing.assert_close(total, expected["embed.weight"], rtol=0, atol=1e-12)


@pytest.mark.world
@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
def test_on_a_v_a_tie_is_one_parameter_with_the_whole_gradient(schedule: str) -> None:
    first, _ = run_world(train_tied, 2, schedule, 4)
    expected, _ = alone(4, tied=True)
    for name in ("embed.weight", "head.weight"):
        torch.testing.assert_close(first.gradients[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_micro", MICROS)
def test_on_a_v_the_first_stage_of_a_rank_is_complete_last(schedule: str, num_ranks: int, num_micro: int) -> None:
    """So a parameter that both its stages share is complete when the first one's last gradient is there."""
    for row in program_for(schedule, num_ranks, num_micro).ranks:
        ends = {stage: row.index(at) for stage, at in last_gradients(row).items()}
        assert max(ends, key=lambda stage: ends[stage]) == min(ends)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_one_rank_with_all_stages_needs_nobody(schedule: str) -> None:
    for num_micro in MICROS:
        told = train(schedule, num_micro)
        assert_alike([told], *alone(num_micro))
        assert told.forward == told.backward == Traffic()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_one_rank_with_all_stages_on_a_gpu(schedule: str) -> None:
    """Hooks and halves run on autograd's device thread there. Without dropout: its stream is not the CPU's."""
    device, chain = torch.device("cuda", 0), ToyChain()
    given = [{key: value.to(device) for key, value in batch.items()} for batch in batches(3)]
    whole, parted = toy().eval().to(device), toy().eval().to(device)
    losses = run_alone(whole, chain, given)
    ranges = stage_ranges(chain.costs, Layout(pipeline=SCHEDULES[schedule]))
    stages = split_into_stages(parted, chain, ranges, range(len(ranges))).stages
    work = ToyWork(chain, given)
    Pipeline(partial(program_for, schedule, 1), stages, RankGroup(0, 1), device).run(work)
    assert work.losses == pytest.approx(losses, abs=1e-10)
    found = {name: gradient for stage in stages.values() for name, gradient in gradients(stage).items()}
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


def evaluate(schedule: str, num_micro: int) -> tuple[dict[int, float], int, int]:
    """Between two steps, in evaluation mode."""
    pipeline, chain = built(schedule)
    pipeline.run(ToyWork(chain, batches(3)))
    before = [gradients(stage) for stage in pipeline.stages.values()]
    for stage in pipeline.stages.values():
        stage.eval()
    work = ToyWork(chain, batches(num_micro, seed=5))
    held = pipeline.peak_held
    with counted() as sent:
        pipeline.forward_only(work)
    after = [gradients(stage) for stage in pipeline.stages.values()]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)
    assert pipeline.peak_held == held
    assert work.backwards == []
    assert sent.backward == Traffic()
    for stage in pipeline.stages.values():
        stage.train()
    pipeline.run(ToyWork(chain, batches(3)))
    return work.losses, sent.forward.num_sent, len(pipeline.stages)


@pytest.mark.world
@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs", "zbv"])
def test_evaluation_runs_forward_alone_and_leaves_training_as_it_was(schedule: str) -> None:
    whole = toy().eval()
    expected = run_alone(whole, ToyChain(), batches(5, seed=5))
    told = run_world(evaluate, 2, schedule, 5)
    assert {micro: loss for losses, _, _ in told for micro, loss in losses.items()} == pytest.approx(
        expected, abs=1e-12
    )
    boundaries = {"1f1b": 1, "looped-bfs": 3, "zbv": 2}[schedule]
    assert sum(num_sent for _, num_sent, _ in told) == 5 * boundaries


class Saved:
    """What autograd keeps of a tensor, so that it can be seen to be let go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that leads back to its own node would keep both


class Weighing(ToyWork):
    """Weighs what autograd holds for the backwards to come."""

    live_bytes = peak_bytes = 0

    def context(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def before_forward(self, stage: int, micro: int) -> None:
        super().before_forward(stage, micro)
        self.stage = stage

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._add(tensor.nbytes)
        weakref.finalize(saved, self._add, -tensor.nbytes)
        return saved

    def _add(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class WeighingOnce(Weighing):
    """How much each stage saves of one micro-batch."""

    def before_forward(self, stage: int, micro: int) -> None:
        super().before_forward(stage, micro)
        self.by_stage = {**getattr(self, "by_stage", {}), stage: 0}

    def _add(self, num_bytes: int) -> None:
        self.by_stage[self.stage] += max(num_bytes, 0)


def weigh(schedule: str, num_micro: int) -> tuple[int, int, dict[int, int]]:
    """Peak and final bytes of a step, and what one micro-batch takes in each stage; without the collector of cycles."""
    pipeline, chain = built(schedule)
    even = [batches(2)[0]] * num_micro
    gc.collect()
    gc.disable()
    once, step = WeighingOnce(chain, even[:1]), Weighing(chain, even)
    pipeline.run(once)
    pipeline.run(step)
    gc.enable()
    return step.peak_bytes, step.live_bytes, dict(zip(pipeline.stages, once.by_stage.values(), strict=True))


def peak_bytes(row: Iterable[PipelineInstruction], by_stage: Mapping[int, int]) -> int:
    held = peak = 0
    for at in row:
        held += by_stage[at.stage] * ((at.kind == "F") - (at.kind in ("B", "W")))
        peak = max(peak, held)
    return peak


@pytest.mark.world
@pytest.mark.parametrize(("schedule", "num_ranks"), [*((schedule, 2) for schedule in SCHEDULES), ("1f1b", 4)])
def test_activations_are_held_as_long_as_the_schedule_says(schedule: str, num_ranks: int) -> None:
    program = program_for(schedule, num_ranks, 6)
    is_split = any(at.kind == "W" for row in program.ranks for at in row)
    for rank, (peak, left, by_stage) in enumerate(run_world(weigh, num_ranks, schedule, 6)):
        assert left == 0
        expected = peak_bytes(program.ranks[rank], by_stage)
        # A first half lets go of what no second half needs.
        assert expected / 2 < peak <= expected if is_split else peak == expected
        if schedule == "1f1b":
            assert peak == by_stage[rank] * min(6, num_ranks - rank)
        if schedule == "gpipe":
            assert peak == by_stage[rank] * 6


class InPlace(nn.Module):
    """Writes over what it reads, as an activation may."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, dim, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu_(hidden) * self.scale


class Constant(nn.Module):
    """Does not read what it is given."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.linspace(0.5, 2.0, dim, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.value.expand(hidden.shape)


class Raising(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ZeroDivisionError("boom")


def write_in_place(module: Toy) -> None:
    for number in range(DEPTH):
        module.layers[number] = InPlace(DIM)


def forget_in_the_middle(module: Toy) -> None:
    module.layers[DEPTH - 2] = Constant(DIM)


def raise_at_the_end(module: Toy) -> None:
    module.layers[DEPTH - 1] = Raising()


@pytest.mark.world
@pytest.mark.parametrize("prepare", [write_in_place, forget_in_the_middle])
def test_units_may_be_odd(prepare: Prepare) -> None:
    given = cases("1f1b", "zbv", "interleaved-zero-bubble")
    told = run_world(train_all, 2, given, prepare)
    for case in given:
        expected, losses = alone(case[1], prepare)
        ranks = [one[case] for one in told]
        zeros = {
            name: torch.zeros_like(g) for one in ranks for name, g in one.gradients.items() if name not in expected
        }
        assert all(
            torch.equal(one.gradients[name], zeros[name]) for one in ranks for name in one.gradients if name in zeros
        )
        assert_alike(ranks, {**expected, **zeros}, losses)


@pytest.mark.world
def test_an_error_in_a_stage_comes_out_as_it_was() -> None:
    with pytest.raises(WorldError) as failed:
        run_world(train_all, 2, [("1f1b", 3)], raise_at_the_end)
    culprit = failed.value.failures[0]
    assert culprit.rank == 1
    assert culprit.detail.rstrip().endswith("ZeroDivisionError: boom")


def steps_of_many_sizes() -> list[int]:
    """Micro-batches of a known size need no further header."""
    pipeline, chain = built("1f1b")
    headers = []
    with counted() as sent:
        for num_micro in (3, 3, 1, 4):
            pipeline.run(ToyWork(chain, batches(num_micro)))
            headers.append(sent.num_headers)
    return headers


@pytest.mark.world
def test_a_form_is_told_once() -> None:
    assert run_world(steps_of_many_sizes, 2) == [[2, 2, 2, 2], [0, 0, 0, 0]]


def test_without_a_pipeline_there_is_none() -> None:
    assert open_pipeline(Layout(data=4), {}, RankGroup(0, 1), CPU) is None


def open_by_layout() -> dict[int, int]:
    layout, chain = Layout(pipeline=2, schedule="zbv"), ToyChain()
    rank = dist.get_rank()
    rank_stages = split_into_stages(toy(), chain, stage_ranges(chain.costs, layout), stage_placement("zbv", 2)[rank])
    pipeline = open_pipeline(layout, rank_stages.stages, RankGroup(rank, 2), CPU)
    assert pipeline is not None
    pipeline.run(ToyWork(chain, batches(4)))
    return dict(pipeline.peak_in_flight)


@pytest.mark.world
def test_a_layout_says_it_all() -> None:
    rows = program_for("zbv", 2, 4).ranks
    expected = [
        {stage: peak_bytes(row, {s: s == stage for s in range(4)}) for stage in {at.stage for at in row}}
        for row in rows
    ]
    assert run_world(open_by_layout, 2) == expected

"""Pipeline stages sharded by FSDP2, with whole and split backwards, against one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.programs import program_for
from closeranks.facts.pipeline.stages import stage_placement
from closeranks.parallel.pipeline.executor import Pipeline
from closeranks.parallel.pipeline.fsdp_split_backward import finish_fsdp_backward, suspend_fsdp_hooks
from closeranks.parallel.pipeline.stages import split_into_stages, stage_ranges
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world
from tests.parallel.toy import ToyChain, ToyWork, batches, gradients, run_alone, toy

CPU = torch.device("cpu")
SCHEDULES = ("1f1b", "zbv", "dualpipev")
MICROS = (1, 4)


class ShardedWork(ToyWork):
    """Does to FSDP2 what its reducer does."""

    sharded: tuple[FSDPModule, ...] = ()
    hold = ""

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        super().begin_backward(stage, is_last=is_last)
        reduces = is_last or self.hold == "shards"
        self.sharded[stage].set_requires_gradient_sync(reduces)
        self.sharded[stage].set_reshard_after_backward(reduces)
        self.sharded[stage].set_is_last_backward(is_last)


def shard(module: nn.Module, chain: ToyChain, mesh: DeviceMesh, hold: str) -> None:
    present = dict(module.named_modules())
    for part in (*(present[name] for name in chain.units if name in present), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=hold == "shards")
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def train(schedule: str, num_micro: int, hold: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Two steps: the second must find everything as the first did."""
    chain, process_group = ToyChain(), mesh.get_group("pipeline")
    rank, data_rank = dist.get_rank(process_group), mesh.get_local_rank("shard")
    ranges = stage_ranges(chain.costs, Layout(pipeline=2, schedule=schedule))
    stages = split_into_stages(toy(), chain, ranges, stage_placement(schedule, 2)[rank]).stages
    for stage in stages.values():
        shard(stage, chain, mesh["shard"], hold)
    pipeline = Pipeline(partial(program_for, schedule, 2), stages, RankGroup(rank, 2, process_group), CPU)
    for step in range(2):
        work = ShardedWork(chain, batches(num_micro, seed=10 * step + data_rank))
        work.sharded, work.hold = tuple(stages.values()), hold  # type: ignore[assignment]
        for stage in stages.values():
            stage.zero_grad()
        pipeline.run(work)
        assert_sharded(stages.values())
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    return {name: weight.grad.full_tensor() for name, weight in named if weight.grad is not None}


def assert_sharded(stages: Any) -> None:
    """After a step nothing whole is left, neither weights nor gradients."""
    for stage in stages:
        assert all(type(weight).__name__ == "DTensor" or weight.requires_grad is False for weight in stage.parameters())


def train_all(hold: str) -> dict[tuple[str, int], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    cases = [(schedule, num_micro) for schedule in SCHEDULES for num_micro in MICROS]
    return {case: train(*case, hold, mesh) for case in cases}


def count_collectives(schedule: str) -> tuple[int, int, int]:
    """Of a pipeline rank: units, and how often one was gathered and reduced in two steps of four micro-batches."""
    calls = Counter[str]()
    for name in ("foreach_all_gather", "foreach_reduce"):
        real = getattr(_fsdp_param_group, name)

        def counted(*given: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            calls[name] += 1
            return real(*given, **options)

        setattr(_fsdp_param_group, name, counted)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    found = train(schedule, 4, "step", mesh)
    units = {name.rpartition(".")[0].removesuffix(".norm").removesuffix(".up").removesuffix(".down") for name in found}
    return len(units), calls["foreach_all_gather"], calls["foreach_reduce"]


@pytest.mark.world
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_held_for_a_step_units_are_gathered_and_reduced_once_in_it(schedule: str) -> None:
    for num_units, num_gathered, num_reduced in run_world(count_collectives, 4, schedule):
        assert num_units >= 4
        assert num_reduced == 2 * num_units
        # FSDP2 prefetches by the order of forwards, which in the last backward of a step may name a unit that is done.
        assert num_gathered - num_reduced in ((0, 2) if schedule == "1f1b" else (0,))


@pytest.mark.world
@pytest.mark.parametrize("hold", ["step", "shards"])
def test_sharded_stages_give_the_gradients_of_one_process(hold: str) -> None:
    told = run_world(train_all, 4, hold, timeout_s=300.0)
    for schedule in SCHEDULES:
        for num_micro in MICROS:
            whole = toy()
            for data_rank in range(2):
                run_alone(whole, ToyChain(), batches(num_micro, seed=10 + data_rank))
            expected = gradients(whole)
            found = {name: gradient for one in told for name, gradient in one[schedule, num_micro].items()}
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


def reduce_by_hand() -> tuple[bool, bool, Tensor]:
    """Settings come back as they were, and nothing is reduced before it is asked for."""
    mesh = init_device_mesh("cpu", (2,))
    layer = nn.Linear(4, 4, bias=False).double()
    nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    loss = layer(torch.full((1, 4), float(dist.get_rank() + 1), dtype=torch.float64)).sum()
    with suspend_fsdp_hooks(layer):
        loss.backward()
        was_quiet = not layer._get_fsdp_state()._state_ctx.is_last_backward
    is_back = layer._get_fsdp_state()._state_ctx.is_last_backward
    assert type(layer.weight).__name__ != "DTensor"
    finish_fsdp_backward(layer)
    return was_quiet, is_back, layer.weight.grad.full_tensor()


@pytest.mark.world
def test_what_was_held_back_is_made_up_for() -> None:
    for was_quiet, is_back, gradient in run_world(reduce_by_hand, 2):
        assert was_quiet
        assert is_back
        assert torch.equal(gradient, torch.full((4, 4), 3.0, dtype=torch.float64))


def test_a_plain_module_needs_nothing() -> None:
    module = nn.Linear(2, 2)
    with suspend_fsdp_hooks(module):
        module(torch.ones(1, 2)).sum().backward()
    finish_fsdp_backward(module)
    assert module.weight.grad is not None

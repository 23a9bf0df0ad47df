"""A world of one on NCCL: every strategy computes what plain autograd does, and never stops the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from closeranks.core.protocols import Reducer
from closeranks.optim.norms import norm_squared
from closeranks.optim.optimizer import Optimizer, freeze, whole_parameters
from closeranks.parallel.fully_shard import _CountedGather, shard_fully
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.fully_sharded import FullyShardedReducer
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.sync.reducers.sharded import ShardedReducer
from tests.sync.strategies import CONFIG

pytestmark = pytest.mark.gpu

ALONE = RankGroup(0, 1)
BLOCKS = ("0", "2")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    return nn.Sequential(block, nn.GELU(), copy.deepcopy(block), nn.Linear(64, 7)).cuda()


def reducer_of(zero: int, hold: str, module: nn.Module, mesh: Any, precision: Precision) -> Reducer:
    if zero == 3:
        shard_fully(module, BLOCKS, mesh, precision=precision, hold=hold, prefetch=1)
        return FullyShardedReducer(local_parameters(module), [module], ALONE, ALONE, hold=hold)
    caps = {"bucket_bytes": 1 << 14, "first_bucket_bytes": 1 << 12}
    return ShardedReducer(local_parameters(module), ALONE, ALONE, zero=zero, hold=hold, **caps)


@pytest.mark.parametrize("name", ["float32", "bf16"])
@pytest.mark.parametrize(("zero", "hold"), [(1, "step"), (2, "step"), (2, "shards"), (3, "step"), (3, "shards")])
def test_as_plain_autograd_and_without_a_host_sync(zero: int, hold: str, name: str, mesh: Any) -> None:
    precision, device = Precision(name), torch.device("cuda", 0)
    plain, module = build(), build()
    chosen = freeze(module, CONFIG)
    reducer = reducer_of(zero, hold, module, mesh, precision)
    ours = Optimizer(reducer.parameter_shards(), chosen, CONFIG, num_steps=9)
    theirs = Optimizer(whole_parameters(plain), freeze(plain, CONFIG), CONFIG, num_steps=9)
    batches = [torch.randn(5, 64, device=device) for _ in range(3)]
    factor, taken = torch.tensor(0.1, device=device), torch.tensor(1.0, device=device)
    for step in range(3):
        for batch in batches:
            with precision.context(device):
                loss = plain(batch).float().square().sum()
            loss.backward()
        theirs.step(step, [p.grad for p in plain.parameters() if p.grad is not None], factor, taken)
        plain.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step makes streams and compiles
        for number, batch in enumerate(batches):
            with precision.context(device):
                loss = module(batch).float().square().sum()
            reducer.begin_backward(is_last=number == 2)
            loss.backward()
            reducer.end_backward()
        reducer.finish()
        norm = norm_squared(reducer.primary_gradients(), device)
        ours.step(step, reducer.gradients(), factor, taken)
        reducer.gather_parameters()
        reducer.release()
        torch.cuda.set_sync_debug_mode("default")
        assert norm.isfinite()
    whole = dict(plain.named_parameters())
    for shard in reducer.parameter_shards():
        expected = whole[shard.piece.name].detach().view(shard.tensor.shape)
        torch.testing.assert_close(shard.tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_travels_is_rounded_and_what_arrives_is_wide(is_async: bool, mesh: Any) -> None:
    sent = torch.randn(1000, device="cuda")
    arrived = torch.empty_like(sent)
    work = _CountedGather(torch.bfloat16)(arrived, sent, mesh.get_group(), async_op=is_async)
    if work is not None:
        work.wait()
    assert torch.equal(arrived, sent.bfloat16().float())
    assert is_async == (work is not None)

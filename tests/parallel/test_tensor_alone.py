"""What a rank of the tensor axis does by itself: shares of a dropout mask, and crossings on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from closeranks.models.llama.model import Block, TokenLoss
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor.activation_collectives import ACTIVATION_COLLECTIVES, TensorAxisGroup

from .splitting import llama_spec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def block() -> Block:
    made = llama_spec(dropout=0.4).build().model.layers[0]
    assert isinstance(made, Block)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_a_sequence_drop_what_the_whole_drops(device: str, dtype: torch.dtype) -> None:
    """No rank is needed: a share draws the whole mask and takes its part."""
    change = torch.rand(3, 8, 32, device=device, dtype=dtype) + 1
    one = block()
    torch.manual_seed(6)
    whole = one._dropped(change)
    dropped = []
    for rank in range(4):
        part = block()
        part.tensor_axis = TensorAxisGroup(rank, 4, "nobody")
        torch.manual_seed(6)
        dropped.append(part._dropped(change[:, 2 * rank : 2 * rank + 2]))
    found = torch.cat(dropped, dim=1)
    assert torch.equal(found == 0, whole == 0)
    torch.testing.assert_close(found, whole)
    assert 0.2 < (whole == 0).float().mean() < 0.6


@pytest.fixture
def nccl() -> Iterator[TensorAxisGroup]:
    """A group of one: NCCL's calls and streams, without anyone to talk to."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        yield TensorAxisGroup.of(RankGroup(0, 1))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_crossings_of_a_group_of_one_change_nothing(nccl: TensorAxisGroup) -> None:
    for name, cross in ACTIVATION_COLLECTIVES.items():
        x = torch.randn(2, 4, 6, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = cross(x, nccl)
        y.backward(2 * torch.ones_like(y))
        assert torch.equal(y, x), name
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2)), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler loads parts of torch that are old
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_a_split_vocabulary_on_an_accelerator(nccl: TensorAxisGroup, compiled: bool) -> None:
    torch.manual_seed(0)
    logits = (10 * torch.randn(2, 64, 1000, device="cuda")).bfloat16()
    targets = torch.randint(1000, (2, 64), device="cuda")
    whole, part = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = TokenLoss()
    loss.tensor_axis = nccl
    if compiled:
        torch._dynamo.reset()
        loss.compile(fullgraph=True)
    expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    found = loss(part, targets)
    for total in (expected, found):
        total.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(part.grad, whole.grad, rtol=1e-2, atol=1e-4)

"""Messages between pipeline ranks: forms, order, bytes, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.parallel.pipeline.p2p import (
    _DTYPES,
    _HEADER,
    MAX_SENDS_IN_FLIGHT,
    HiddenStateMeta,
    MessageKey,
    P2PChannel,
)
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world
from tests.parallel.messages import Messages, Traffic, counted

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 2**40), max_size=8).map(tuple), st.sampled_from(_DTYPES), st.booleans())
def test_a_header_says_it_all(shape: tuple[int, ...], dtype: torch.dtype, wants_gradient: bool) -> None:
    meta = HiddenStateMeta(shape, dtype, wants_gradient)
    assert len(meta.encode()) == _HEADER
    assert HiddenStateMeta.decode(meta.encode()) == meta


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(ModelError, match="complex64 tensor of shape \\[3\\], which stages cannot send"):
        HiddenStateMeta((3,), torch.complex64, True).encode()
    with pytest.raises(ModelError, match="at most 8 dims"):
        HiddenStateMeta((1,) * 9, torch.float32, True).encode()


@given(st.sets(st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 4095), st.integers(0, 9999))))
def test_no_two_messages_share_a_tag(keys: set[tuple[str, int, int]]) -> None:
    tags = {MessageKey(direction, boundary, micro).tag for direction, boundary, micro in keys}  # type: ignore[arg-type]
    assert len(tags) == len(keys)
    assert all(4096 <= tag < 2**31 for tag in tags)


def opened() -> P2PChannel:
    channel = P2PChannel(RankGroup(dist.get_rank(), dist.get_world_size()), CPU)
    channel.open()
    return channel


def outputs() -> list[Tensor]:
    """Two kinds; of the second, one that is not contiguous."""
    numbers = torch.arange(12, dtype=torch.float64, requires_grad=True)
    return [numbers.view(2, 6) * 2, numbers.view(4, 3).T * 3, numbers.view(2, 6) * 4]


def counted_there_and_back() -> tuple[list[Tensor], Messages, list[bool]]:
    with counted() as sent:
        received, leaves = there_and_back()
    return received, sent, [leaf.requires_grad for leaf in leaves]


def there_and_back() -> tuple[list[Tensor], list[Tensor]]:
    channel, others = opened(), outputs()
    forward = [MessageKey("forward", 0, micro) for micro in range(3)]
    backward = [MessageKey("backward", 0, micro) for micro in range(3)]
    leaves: list[Tensor] = []
    if channel.group.rank == 0:
        for key, output in zip(forward, others, strict=True):
            channel.send_meta(0, tuple(output.shape), HiddenStateMeta.of(output), 1)
            channel.send(key, output, 1)
        for key, output in zip(backward, others, strict=True):
            channel.post_receive(key, HiddenStateMeta(tuple(output.shape), output.dtype, False), 1)
        received = [channel.wait_receive(key) for key in reversed(backward)][::-1]
    else:
        for key, output in zip(forward, others, strict=True):
            channel.post_receive(key, channel.receive_meta(0, tuple(output.shape), 0), 0)
        leaves = [channel.wait_receive(key) for key in reversed(forward)][::-1]
        for key, leaf in zip(reversed(backward), reversed(leaves), strict=True):  # tags tell them apart
            channel.send(key, leaf.expand(leaf.shape) + 1, 0)
        received = [leaf.detach() for leaf in leaves]
    channel.wait_all()
    return received, leaves


@pytest.mark.world
def test_hidden_states_go_there_and_gradients_back() -> None:
    (back, *sender), (there, *receiver) = run_world(counted_there_and_back, 2)
    for output, arrived, returned in zip(outputs(), there, back, strict=True):
        assert torch.equal(arrived, output)
        assert torch.equal(returned, output + 1)
    all_three = Traffic(3, 3 * 12 * 8)
    assert sender == [Messages(2, forward=all_three), []]  # two kinds, so two headers
    assert receiver == [Messages(0, backward=all_three), [True] * 3]


def many_then_read() -> int:
    channel = opened()
    num_messages = 3 * MAX_SENDS_IN_FLIGHT
    meta = HiddenStateMeta((5,), torch.float32, False)
    most = 0
    for micro in range(num_messages):
        if channel.group.rank == 0:
            channel.send(MessageKey("forward", 0, micro), torch.full((5,), float(micro)), 1)
            most = max(most, len(channel._in_flight))
        else:
            channel.post_receive(MessageKey("forward", 0, micro), meta, 0)
            assert channel.wait_receive(MessageKey("forward", 0, micro)).eq(micro).all()
    channel.wait_all()
    assert len(channel._in_flight) == 0
    return most


@pytest.mark.world
def test_only_so_many_sends_are_under_way() -> None:
    assert run_world(many_then_read, 2) == [MAX_SENDS_IN_FLIGHT, 0]


def change_of_form() -> str:
    channel = opened()
    if channel.group.rank == 1:
        channel.receive_meta(0, "kind", 0)
        return ""
    channel.send_meta(0, "kind", HiddenStateMeta((2,), torch.float32, True), 1)
    channel.send_meta(0, "kind", HiddenStateMeta((2,), torch.float32, True), 1)
    with pytest.raises(ModelError) as refused:
        channel.send_meta(0, "kind", HiddenStateMeta((3,), torch.float32, True), 1)
    channel.wait_all()
    return str(refused.value)


@pytest.mark.world
def test_alike_micro_batches_must_give_alike_outputs() -> None:
    said, _ = run_world(change_of_form, 2)
    assert "stage 0 gave" in said
    assert "(3,)" in said

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.data.loading.shared_batches import SharedBatchReader, SharedBatchWriter, padded_size
from closeranks.data.loading.shared_pickle import pack, unpack
from tests.data.doubles import HeldSource, LocalSource, MixedSource


class Way:
    """From an outbox to an inbox and back, as the sockets would carry it."""

    def __init__(self) -> None:
        self.outbox, self.inbox = SharedBatchWriter(), SharedBatchReader()

    def send(self, value: Any) -> Any:
        ref, fd = self.outbox.put(value)
        if fd is not None:
            self.inbox.add(ref.slot, fd)
            os.close(fd)
        return self.inbox.take(ref)

    def free(self) -> list[int]:
        freed = []
        while self.inbox.free:
            freed.append(self.inbox.free.popleft())
            self.outbox.reuse(freed[-1])
        return freed


def test_every_kind_of_leaf_arrives() -> None:
    sent = MixedSource(20).read(np.array([2, 5, 7]))
    got = Way().send(sent)
    assert got.keys() == sent.keys()
    for name in ("id", "wide", "half", "is_even", "strided", "empty"):
        assert got[name].dtype == sent[name].dtype
        assert torch.equal(got[name], sent[name])
    assert got["text"] == ["sample 2", "sample 5", "sample 7"]
    assert torch.equal(got["nested"]["pair"][0], torch.tensor([3, 6, 8]))
    assert got["nested"]["pair"][1] == 7
    assert torch.equal(got["nested"]["sparse"].to_dense(), torch.eye(2))


def test_a_gradient_stays_behind() -> None:
    got = Way().send({"x": torch.ones(2, requires_grad=True)})
    assert not got["x"].requires_grad


def test_a_slot_is_lent_until_the_last_tensor_is_gone() -> None:
    way = Way()
    got = way.send({"x": torch.arange(5), "y": torch.arange(7)})
    part = got["y"][2:4]
    assert way.free() == []
    del got
    assert way.free() == []
    assert part.tolist() == [2, 3]
    del part
    assert way.free() == [0]


def test_a_batch_stays_as_it_is_while_somebody_holds_it() -> None:
    way, held = Way(), deque[Any]()
    for number in range(50):
        held.append((number, way.send({"x": torch.full((1000,), number)})["x"]))
        if len(held) > 3:
            held.popleft()
        way.free()
        assert all(bool((tensor == value).all()) for value, tensor in held)
    assert len(way.inbox._slots) == 4


def test_slots_are_used_again() -> None:
    way = Way()
    for number in range(20):
        assert way.send({"x": torch.tensor([number])})["x"].tolist() == [number]
        assert way.free() == [0]
    assert len(way.inbox._slots) == 1


def test_a_batch_that_does_not_fit_gets_a_larger_slot_in_place_of_the_small_one() -> None:
    way = Way()
    for size in (10, 100_000, 50, 3_000_000, 3_000_000):
        got = way.send({"x": torch.arange(size)})
        assert torch.equal(got["x"], torch.arange(size))
        del got
        assert len(way.free()) == 1
    assert len(way.inbox._slots) == 1


def test_the_last_tensor_may_go_in_any_thread() -> None:
    way = Way()
    box = [way.send({"x": torch.arange(5)})]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert way.free() == [0]


def test_no_descriptor_is_left() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    way = Way()
    for size in (10, 100_000):
        way.send({"x": torch.arange(size)})
        way.free()
    del way
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


@given(st.integers(0, 1 << 40))
def test_slots_have_room_but_not_too_much(num_bytes: int) -> None:
    assert num_bytes <= padded_size(num_bytes) <= max(1.25 * num_bytes, num_bytes + (1 << 16))
    assert padded_size(padded_size(num_bytes)) == padded_size(num_bytes)


# A dataset on its way to the processes


def test_a_dataset_arrives_and_its_arrays_are_shared_until_written() -> None:
    source = HeldSource(8)
    fd = pack((source, {"also": torch.arange(6).view(2, 3).t()}))
    here, there = unpack(fd), unpack(fd)
    os.close(fd)
    for arrived, other in (here, there):
        assert np.array_equal(arrived.array, source.array)
        assert torch.equal(arrived.tensor, source.tensor)
        assert arrived.nothing.shape == (0, 3)
        assert torch.equal(other["also"], torch.arange(6).view(2, 3).t())
    here[0].array[0] += 1.0
    here[0].tensor[0] += 1.0
    assert np.array_equal(there[0].array, source.array)
    assert torch.equal(there[0].tensor, source.tensor)


def test_arrays_lie_beside_the_pickle_once() -> None:
    source = HeldSource(1000)
    fd = pack(source)
    assert os.fstat(fd).st_size < source.array.nbytes + source.tensor.nbytes + 10_000
    os.close(fd)


def test_a_dataset_that_cannot_be_sent_is_refused_in_one_sentence() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=r"cannot be sent to loader processes: .*lock.*Set data.workers = 0"):
        pack(LocalSource(8))
    assert set(os.listdir("/proc/self/fd")) == before

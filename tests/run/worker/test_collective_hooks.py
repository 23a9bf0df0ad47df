"""Every collective of a process is in the record, whoever issued it, and comes out as it does without one."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from closeranks.agent.detection.progress import create_progress_fd
from closeranks.agent.detection.standstill.collective_record import Collective, CollectiveRecord
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor import activation_collectives
from closeranks.parallel.tensor.activation_collectives import TensorAxisGroup
from closeranks.run.worker.collective_hooks import CollectiveHooks
from closeranks.testing import run_world

pytestmark = pytest.mark.world
Row = tuple[str, tuple[int, ...], str, int]


def _all_kinds() -> list[torch.Tensor]:
    """Each collective once; returns the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(4.0) + rank
    total, root, parts = own.clone(), own.clone(), [torch.empty(4) for _ in range(size)]
    dist.all_reduce(total)
    dist.broadcast(root, 0)
    dist.all_gather(parts, own)
    whole = torch.empty(4 * size)
    dist.all_gather_into_tensor(whole, own)
    share = torch.empty(2)
    dist.reduce_scatter_tensor(share, own)
    swapped = torch.empty(4)
    dist.all_to_all_single(swapped, own)
    work = dist.all_reduce(own, async_op=True)
    assert work is not None
    work.wait()
    passed = torch.empty(3)
    if rank:
        dist.recv(passed, 0)
    else:
        dist.send(torch.ones(3), 1)
    dist.barrier()
    summed = funcol.all_reduce(own, "sum", dist.group.WORLD) + 0
    return [total, root, *parts, whole, share, swapped, own, summed]


def _recorded() -> tuple[list[list[float]], list[list[float]], list[Row], int]:
    plain = [one.tolist() for one in _all_kinds()]
    fd = create_progress_fd()
    record = CollectiveRecord(fd)
    hooks = CollectiveHooks(record)
    hooks.label(RankGroup(dist.get_rank(), dist.get_world_size()), "data")
    seen = [one.tolist() for one in _all_kinds()]
    hooks.remove()
    rows = [_row(one) for one in record.read()]
    assert all(one.is_done for one in record.read()), record.read()
    before = len(record.read())
    _all_kinds()
    assert len(record.read()) == before, "removed"
    assert record.groups()[0].axis == "data"
    return plain, seen, rows, record.groups()[0].sequence


def _row(one: Collective) -> Row:
    return one.op, one.shape, one.place.rpartition(" in ")[2], one.sequence


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_all_kinds_are_recorded_and_give_what_they_gave() -> None:
    for rank, (plain, seen, rows, sequence) in enumerate(run_world(_recorded, 2)):
        assert seen == plain
        p2p = ("recv" if rank else "send", (3,), "_all_kinds", 0)
        assert [row for row in rows if row[3] == 0] == [p2p]
        assert [row[0] for row in rows if row[3]] == [
            *("all_reduce", "broadcast", "all_gather", "all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
            *("barrier", "all_reduce"),
        ]
        assert [row[1] for row in rows if row[3]] == [(4,), (4,), (4,), (4,), (2,), (4,), (4,), (), (4,)]
        assert {row[2] for row in rows} == {"_all_kinds"}, "the user's line"
        assert [row[3] for row in rows if row[3]] == list(range(1, 10))
        assert sequence == 9


def _of_torch() -> list[Row]:
    """What FSDP2 and DTensor issue by themselves."""
    record = CollectiveRecord(create_progress_fd())
    hooks = CollectiveHooks(record)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    module(torch.ones(2, 4)).sum().backward()
    dtensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    dtensor.redistribute(mesh, [Replicate()]).to_local().sum().item()
    hooks.remove()
    return [_row(one) for one in record.read() if one.op != "barrier"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_those_that_torch_issues_itself_are_seen() -> None:
    for rows in run_world(_of_torch, 2):
        assert [row[0] for row in rows] == ["all_gather", "reduce_scatter", "all_gather"], rows
        assert {row[2] for row in rows} == {"_of_torch"}, "at the user's line that leads there"


def _of_the_tensor_axis() -> list[Row]:
    record = CollectiveRecord(create_progress_fd())
    hooks = CollectiveHooks(record)
    axis = TensorAxisGroup.of(RankGroup(dist.get_rank(), dist.get_world_size()))
    activations = torch.ones(2, 4, 3, requires_grad=True)
    whole = activation_collectives.all_gather(activations, axis)
    activation_collectives.all_reduce(whole, axis).sum().backward()
    hooks.remove()
    assert all(one.is_done for one in record.read())
    return [_row(one) for one in record.read()]


def test_those_of_the_tensor_axis_are_seen_in_both_directions() -> None:
    for rows in run_world(_of_the_tensor_axis, 2):
        assert [row[0] for row in rows] == ["all_gather", "all_reduce", "reduce_scatter"], rows


def _without_a_record() -> list[float]:
    """Recording goes wrong: its table of groups is gone."""
    record = CollectiveRecord(create_progress_fd())
    hooks = CollectiveHooks(record)
    record._groups = None  # type: ignore[assignment]
    values = torch.ones(2)
    dist.all_reduce(values)
    hooks.remove()
    return values.tolist()


def test_a_record_that_fails_does_not_stop_training() -> None:
    assert run_world(_without_a_record, 2) == [[2.0, 2.0]] * 2


def _wait_for_a_late_rank() -> dict[str, Any]:
    """Rank 0 waits while rank 1 looks at nothing: what another thread reads of it meanwhile, as the agent does."""
    fd = create_progress_fd()
    record, agents_end = CollectiveRecord(fd), CollectiveRecord(fd)
    os.close(fd)
    hooks = CollectiveHooks(record)
    values = torch.ones(5)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.all_reduce(values)
        return {}
    seen: list[Collective] = []

    def look() -> None:
        while not (rows := agents_end.read()) or not rows[-1].is_waiting:
            time.sleep(0.01)
        seen.append(rows[-1])

    thread = threading.Thread(target=look)
    thread.start()
    dist.all_reduce(values)
    thread.join()
    hooks.remove()
    return {"waiting": (seen[0].op, seen[0].shape, seen[0].dtype), "done": agents_end.read()[-1].is_done}


def test_a_rank_that_waits_is_seen_waiting() -> None:
    first, _ = run_world(_wait_for_a_late_rank, 2)
    assert first == {"waiting": ("all_reduce", (5,), "float32"), "done": True}

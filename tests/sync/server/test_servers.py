"""Parameter servers: what one process would do, a bound that is never exceeded, every push applied once."""

from __future__ import annotations

import pytest
import torch

from closeranks.testing import run_world
from tests.sync.server.driven import Seen, drive
from tests.sync.strategies import reference

pytestmark = pytest.mark.world


def assert_equal_weights(one: Seen, other: Seen) -> None:
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.mark.parametrize(("size", "num_servers"), [(2, 1), (4, 1), (5, 2), (4, 3)])
def test_synchronous_servers_do_what_one_process_does(size: int, num_servers: int) -> None:
    num_workers = size - num_servers
    ranks = run_world(drive, size, "sync", num_servers, 3, 0, 1)
    expected = reference([[100 * step + rank for rank in range(num_workers)] for step in range(3)])
    for seen in ranks:
        for name, weight in expected.weights.items():
            torch.testing.assert_close(seen.weights[name], weight, rtol=1e-11, atol=1e-11)


def test_a_bound_of_zero_is_synchronous_in_every_bit() -> None:
    (sync, *_), stale = run_world(drive, 5, "sync", 2, 6, 0, 1), run_world(drive, 5, "stale", 2, 6, 0, 3)
    for seen in stale:
        assert_equal_weights(sync, seen)
        assert set(seen.versions) == {0}


def assert_bounded(workers: list[Seen], bound: int) -> int:
    """By the clock alone: no worker began a step before all others had begun backward in every step that it may not
    lack. Returns how far ahead of the slowest any worker was seen to be."""
    furthest = 0
    for number, seen in enumerate(workers):
        for step, began in enumerate(seen.began):
            for other in workers[:number] + workers[number + 1 :]:
                done = sum(pushing <= began for pushing in other.pushing)
                assert done >= step - bound, (
                    f"worker {number} began step {step} when another had begun {done} backwards"
                )
                furthest = max(furthest, step - done)
    return furthest


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_bound_is_never_exceeded_and_is_used(bound: int) -> None:
    ranks = run_world(drive, 5, "stale", 2, 24, bound, 12, bound)
    workers = ranks[:3]
    assert assert_bounded(workers, bound) == bound
    assert max(stale for seen in workers for stale in seen.versions) == bound
    for seen in workers:
        assert seen.versions[12] == 0, "all ranks synchronize before step 12"
    for one in ranks:
        assert_equal_weights(ranks[0], one)


def test_the_recorder_finds_a_bound_that_is_exceeded() -> None:
    workers = run_world(drive, 5, "stale", 2, 24, 4, 12, 4)[:3]
    with pytest.raises(AssertionError, match="began step"):
        assert_bounded(workers, 2)


def test_asynchronous_servers_apply_every_push_once() -> None:
    num_steps, num_workers = 12, 3
    ranks = run_world(drive, 5, "async", 2, num_steps, 1, 6, 2)
    for server in ranks[num_workers:]:
        assert sorted(step for step, _ in server.applied) == sorted(list(range(num_steps)) * num_workers)
        first = [staleness for step, staleness in server.applied if step in (0, 6)]
        assert min(first) == 0.0, "the first push after a synchronization lacks nothing"
        assert max(staleness for _, staleness in server.applied) > 0.0
        most = float(num_steps * num_workers)
        assert max(server.counters) == most
    for seen in ranks:
        for one, other in zip(seen.synchronized, ranks[0].synchronized, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    applied = [step for step, _ in ranks[num_workers].applied]
    assert applied != sorted(applied), "a fast worker is not held up by a slow one"

"""The harness itself: results, and what becomes of ranks that raise, die or hang."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks.core.system.environment import detect_world
from closeranks.testing import Failure, WorldError, run_world
from tests.core.system.test_linux import huge_pages_can_be_asked_for

pytestmark = pytest.mark.world


def total(start: int) -> int:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


def describe() -> dict[str, Any]:
    world = detect_world()
    return {
        "world": (world.rank, world.size, world.launcher),
        "threads": torch.get_num_threads(),
        "setting": os.environ.get("CLOSERANKS_TEST_SETTING"),
        "folder": os.getcwd(),
    }


def big_tensor() -> torch.Tensor:
    return torch.full((1 << 18,), float(dist.get_rank()))


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("odd one out")
    dist.barrier()


def die_on_one(number: int) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        wait_in_a_named_place()
    dist.barrier()


def wait_in_a_named_place() -> None:
    signal.pause()


def leave_early() -> int:
    """The last collective of one rank may still be under way when another is done."""
    values = torch.ones(1 << 16)
    for _ in range(20):
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return int(values.sum())


def say_something() -> None:
    print("hello")
    print("on stderr", file=sys.stderr)


def exit_oddly() -> None:
    sys.exit(3)


def return_a_function() -> Any:
    return lambda: None


def own_pid() -> int:
    return os.getpid()


def huge_pages_of_the_server() -> int:
    found = re.search(r"AnonHugePages: +(\d+)", Path(f"/proc/{os.getppid()}/smaps_rollup").read_text())
    return int(found[1]) if found else 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(size: int) -> None:
    assert run_world(total, size, 10) == [sum(10 + rank for rank in range(size))] * size


def test_a_rank_knows_its_world_environment_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for setting in ("one", "two"):
        monkeypatch.setenv("CLOSERANKS_TEST_SETTING", setting)
        monkeypatch.chdir(tmp_path)
        for rank, seen in enumerate(run_world(describe, 2)):
            assert seen == {"world": (rank, 2, "testing"), "threads": 1, "setting": setting, "folder": str(tmp_path)}


def test_tensors_come_back_by_value() -> None:
    for rank, result in enumerate(run_world(big_tensor, 3)):
        assert torch.equal(result, torch.full((1 << 18,), float(rank)))


def test_an_exception_is_told_with_its_traceback_first() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(raise_on_one, 3)
    culprit, *_ = caught.value.failures
    assert (culprit.rank, culprit.kind) == (1, "raised")
    assert "odd one out" in culprit.detail
    assert "in raise_on_one" in str(caught.value).split("--- rank")[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_goes_before_its_echoes(number: signal.Signals) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(die_on_one, 3, number)
    culprit, *others = caught.value.failures
    assert (culprit.rank, culprit.kind) == (1, "died")
    assert number.name in culprit.detail
    assert all(other.kind == "echoed" for other in others)


def test_a_hang_shows_where_each_rank_stands() -> None:
    started_at = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(hang_on_one, 2, timeout_s=8.0)  # in which both get there
    assert time.monotonic() - started_at < 120.0
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(0, "hung"), (1, "hung")]
    assert "in barrier" in caught.value.failures[0].detail
    assert "in wait_in_a_named_place" in caught.value.failures[1].detail


def test_ranks_wait_for_each_other_at_the_end() -> None:
    assert run_world(leave_early, 4) == [1 << 16] * 4


def test_what_ranks_print_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    run_world(say_something, 2)
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] hello",
        "[rank 0] on stderr",
        "[rank 1] hello",
        "[rank 1] on stderr",
    ]


def test_an_exit_and_a_result_that_does_not_pickle_are_failures() -> None:
    with pytest.raises(WorldError, match="SystemExit: 3"):
        run_world(exit_oddly, 1)
    with pytest.raises(WorldError, match="pickle"):
        run_world(return_a_function, 1)


def test_no_rank_outlives_the_call() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pids = run_world(own_pid, 3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_are_forked_from_huge_pages() -> None:
    """Most of the processor time of a rank that does little is the kernel's, for its pages."""
    assert (run_world(huge_pages_of_the_server, 1)[0] > 0) == huge_pages_can_be_asked_for()


def test_failures_sort_by_cause() -> None:
    failures = [
        Failure(0, "echoed", "", 1.0),
        Failure(1, "raised", "", 3.0),
        Failure(2, "raised", "", 2.0),
        Failure(3, "died", "", 4.0),
        Failure(4, "hung", "", 0.0),
    ]
    assert [failure.rank for failure in WorldError(failures).failures] == [3, 2, 1, 0, 4]

"""Each fault against real processes that an agent could have forked: the kernel does it, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from closeranks.agent.detection.process_probe import kernel_state
from closeranks.core.errors import SetupError
from closeranks.elastic.faults import inject
from closeranks.elastic.faults.cgroups import CPU, FREEZER, MEMORY, remove_stale_groups
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injector
from closeranks.elastic.faults.processes import TargetProcess
from tests.elastic.faults.worker_processes import FakeView, WorkerTree, groups_left, has, is_alive, until, worker_tree

pytestmark = pytest.mark.world


def turned(injector: Injector, view: FakeView) -> None:
    """One more turn of an agent's loop."""
    view.now = time.monotonic()
    injector(view)


def struck(injector: Injector, view: FakeView, count: int = 1) -> None:
    def is_struck() -> bool:
        turned(injector, view)
        return len(injector.injections) == count

    until(is_struck)


def test_a_kill_waits_for_its_step_and_strikes_once(tmp_path: Path) -> None:
    with worker_tree(2, "wait", tmp_path) as workers, Injector([InjectedFault("kill", 3, 1)]) as injector:
        view = workers.view()
        for step in (1, 2):
            assert injector(view.at(step)) is not None
            assert is_alive(workers.pids[1])
        assert injector(view.at(3)) is None
        assert workers.next_end() == (1, -signal.SIGKILL)
        assert [(one.step, one.generation, one.error) for one in injector.injections] == [(3, 0, "")]
        view.generation = 1
        injector(view.at(3))
        assert len(injector.injections) == 1
        assert is_alive(workers.pids[0])


def test_two_die_at_once_or_none_does(tmp_path: Path) -> None:
    with worker_tree(3, "wait", tmp_path) as workers, Injector([InjectedFault("kill2", 1, 0, 2)]) as injector:
        view = workers.view()
        whole, view.local_workers = view.local_workers, view.local_workers[:2]
        injector(view)
        assert not injector.injections
        view.local_workers = whole
        injector(view)
        assert {workers.next_end() for _ in range(2)} == {(0, -signal.SIGKILL), (2, -signal.SIGKILL)}


def test_stop_term_and_zygote_are_signals(tmp_path: Path) -> None:
    faults = [InjectedFault("stop", 1, 0), InjectedFault("term", 1, 1), InjectedFault("zygote", 1)]
    with worker_tree(2, "wait", tmp_path) as workers, Injector(faults) as injector:
        view = workers.view()
        injector(view)
        until(lambda: workers.state(0) == "T")
        injector(view)
        assert len(injector.injections) == 1, "a generation is struck once"
        view.generation = 1
        injector(view)
        assert workers.next_end() == (1, -signal.SIGTERM)
        view.generation = 2
        injector(view)
        assert workers.process.wait(60) == -signal.SIGKILL
        assert [one.fault for one in injector.injections] == faults


def test_a_stranger_is_never_struck(tmp_path: Path) -> None:
    """Also where the kernel has given a worker's number to another process."""
    with pytest.raises(ProcessLookupError):
        TargetProcess(os.getppid())
    with worker_tree(1, "wait", tmp_path) as workers, Injector([InjectedFault("kill", 1, 0)]) as injector:
        view = workers.view()
        view.local_workers[0].pid = os.getppid()
        injector(view)
        assert injector.missed == (InjectedFault("kill", 1, 0),)
        assert not injector.injections


def test_an_exception_is_raised_by_a_connection_that_fails(tmp_path: Path) -> None:
    with worker_tree(1, "talk", tmp_path) as workers, Injector([InjectedFault("exception", 1, 0)]) as injector:
        until((tmp_path / "up-0").exists)
        injector(workers.view())
        until(lambda: (tmp_path / "raised-0").exists() and bool((tmp_path / "raised-0").read_text()))
        assert (tmp_path / "raised-0").read_text() == "end BrokenPipeError"
        assert injector.injections[0].note == "2 connections shut down"
        assert is_alive(workers.pids[0])


def test_who_has_no_connection_cannot_lose_one(tmp_path: Path) -> None:
    with worker_tree(1, "wait", tmp_path) as workers, Injector([InjectedFault("exception", 1, 0)]) as injector:
        injector(workers.view())
        assert "no connection" in injector.injections[0].error


@has(FREEZER)
def test_a_hang_freezes_all_of_it_and_yields_to_a_fence(tmp_path: Path) -> None:
    with worker_tree(1, "spin", tmp_path) as workers, Injector([InjectedFault("hang", 1, 0)]) as injector:
        view = workers.view()
        injector(view)
        assert injector.injections[0].note == "frozen"
        before = _settled_cpu_s(workers)
        os.kill(workers.pids[0], signal.SIGCONT)  # would wake what SIGSTOP has stopped
        time.sleep(0.3)
        assert workers.cpu_s(0) == before
        assert workers.state(0) != "T"
        until(lambda: kernel_state(workers.pids[0]) == "T")  # for the agent it is stopped, once all its threads froze
        os.kill(workers.pids[0], signal.SIGKILL)
        assert workers.next_end() == (0, -signal.SIGKILL)
        until(lambda: injector(view) is None)
    assert not groups_left()


def _settled_cpu_s(workers: WorkerTree) -> float:
    """Once it has stopped counting: a freeze takes effect when the process next leaves the kernel."""
    last = -1.0
    while last != workers.cpu_s(0):
        last = workers.cpu_s(0)
        time.sleep(0.05)
    return last


@has(FREEZER)
def test_a_run_that_ends_early_finds_its_worker_thawed(tmp_path: Path) -> None:
    with worker_tree(1, "spin", tmp_path) as workers:
        injector = Injector([InjectedFault("hang", 1, 0)])
        injector(workers.view())
        before = _settled_cpu_s(workers)
        with pytest.raises(KeyboardInterrupt), injector:
            raise KeyboardInterrupt
        assert not groups_left()
        until(lambda: workers.cpu_s(0) > before)


@has(CPU)
def test_a_slow_worker_gets_its_share_and_then_all_again(tmp_path: Path) -> None:
    """Two workers for as many cores as others leave: only the kernel's own count of one's time is held to the quota."""
    with (
        worker_tree(1, "spin", tmp_path) as workers,
        Injector([InjectedFault("slow", 2, 0, steps=2, share=0.1)]) as injector,
    ):
        view = workers.view()
        injector(view.at(2))
        started_at, before = time.monotonic(), workers.cpu_s(0)
        time.sleep(1.5)
        share = (workers.cpu_s(0) - before) / (time.monotonic() - started_at)
        assert share < 0.2
        injector(view.at(3))
        assert groups_left()
        injector(view.at(4))
        assert not groups_left()
        until(lambda: _share(workers, 0.3) > 2 * share, timeout_s=60)


def _share(workers: WorkerTree, seconds: float) -> float:
    started_at, before = time.monotonic(), workers.cpu_s(0)
    time.sleep(seconds)
    return (workers.cpu_s(0) - before) / (time.monotonic() - started_at)


@has(MEMORY)
def test_the_kernel_kills_who_may_take_no_page_more(tmp_path: Path) -> None:
    with worker_tree(2, "grow", tmp_path) as workers, Injector([InjectedFault("oom", 1, 1)]) as injector:
        kills = _num_oom_kills()
        view = workers.view()
        struck(injector, view)
        assert workers.next_end() == (1, -signal.SIGKILL)
        assert injector.injections[0].note == "killed by the kernel's out-of-memory killer"
        assert _num_oom_kills() > kills
        until(lambda: injector(view) is None)
        assert is_alive(workers.pids[0])
    assert not groups_left()


@has(MEMORY)
def test_who_dies_between_two_looks_of_one_turn_was_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once_it_is_dead(victim: TargetProcess) -> bool:
        until(lambda: is_dead(victim))
        return True

    is_dead = TargetProcess.is_dead.fget
    monkeypatch.setattr(TargetProcess, "is_dead", property(once_it_is_dead))
    with worker_tree(1, "grow", tmp_path) as workers, Injector([InjectedFault("oom", 1, 0)]) as injector:
        injector(workers.view())
        assert [strike.note for strike in injector.injections] == ["killed by the kernel's out-of-memory killer"]


def _num_oom_kills() -> int:
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@has(MEMORY)
def test_a_worker_that_asks_for_nothing_is_let_go_at_the_end(tmp_path: Path) -> None:
    with worker_tree(1, "wait", tmp_path) as workers:
        with Injector([InjectedFault("oom", 1, 0)]) as injector:
            injector(workers.view())
            assert injector.missed
        assert is_alive(workers.pids[0])
    assert not groups_left()


@has(FREEZER)
def test_what_a_killed_process_of_ours_left_is_swept(tmp_path: Path) -> None:
    from closeranks.elastic.faults.cgroups import find_cgroup_parent

    home = find_cgroup_parent(FREEZER).path
    with worker_tree(1, "wait", tmp_path) as workers:
        left = home / f"closeranks-{workers.process.pid}-0"
        left.mkdir()
        remove_stale_groups(home)
        assert left.is_dir(), "its maker lives"
    remove_stale_groups(home)
    assert not left.exists()


def test_a_fault_without_means_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "unavailable_kinds", lambda kinds: {"oom": "there is no memory control"})
    with pytest.raises(SetupError, match="the fault oom is not possible here: there is no memory control"):
        Injector([InjectedFault("oom", 1, 0)])


def test_nobody_is_struck_while_ranks_are_closed_or_the_run_ends(tmp_path: Path) -> None:
    from tests.elastic.faults.worker_processes import Phase

    with worker_tree(1, "wait", tmp_path) as workers, Injector([InjectedFault("kill", 1, 0)]) as injector:
        view = workers.view()
        for state in ("starting", "closing ranks", "stopping"):
            view.state = state
            injector(view)
        view.state = "running"
        for phase in (Phase.START, Phase.END):
            view.local_workers[0].progress.phase = phase
            injector(view)
        assert not injector.injections
        view.local_workers[0].progress.phase = Phase.COMPUTE
        injector(view)
        assert workers.next_end() == (0, -signal.SIGKILL)


def test_a_place_in_the_step_is_a_share_of_the_last_one(tmp_path: Path) -> None:
    with worker_tree(1, "wait", tmp_path) as workers, Injector([InjectedFault("kill", 3, 0, at=0.5)]) as injector:
        view = workers.view()
        injector(view.at(1))
        view.now += 50.0
        view.generation = 1  # what lies between two generations was no step
        injector(view.at(2))
        injector(view.at(3))  # the second step took 1 s
        view.now += 0.4
        injector(view)
        assert not injector.injections
        view.now += 0.2
        injector(view)
        assert injector.injections

"""Each fault against real processes that an agent could have forked: the kernel does it, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from closeranks.core.errors import SetupError
from closeranks.elastic.faults import inject
from closeranks.elastic.faults.cgroups import CPU, FREEZER, MEMORY, remove_stale_groups
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injector
from closeranks.elastic.faults.processes import TargetProcess
from tests.elastic.faults.crews import Shown, Tree, groups_left, has, is_alive, tree, until

pytestmark = pytest.mark.world


def turned(injector: Injector, shown: Shown) -> None:
    """One more turn of an agent's loop."""
    shown.now = time.monotonic()
    injector(shown)


def struck(injector: Injector, shown: Shown, count: int = 1) -> None:
    def is_struck() -> bool:
        turned(injector, shown)
        return len(injector.injections) == count

    until(is_struck)


def test_a_kill_waits_for_its_step_and_strikes_once(tmp_path: Path) -> None:
    with tree(2, "wait", tmp_path) as crew, Injector([InjectedFault("kill", 3, 1)]) as injector:
        shown = crew.shown()
        for step in (1, 2):
            assert injector(shown.at(step)) is not None
            assert is_alive(crew.pids[1])
        assert injector(shown.at(3)) is None
        assert crew.next_end() == (1, -signal.SIGKILL)
        assert [(one.step, one.generation, one.error) for one in injector.injections] == [(3, 0, "")]
        shown.generation = 1
        injector(shown.at(3))
        assert len(injector.injections) == 1
        assert is_alive(crew.pids[0])


def test_two_die_at_once_or_none_does(tmp_path: Path) -> None:
    with tree(3, "wait", tmp_path) as crew, Injector([InjectedFault("kill2", 1, 0, 2)]) as injector:
        shown = crew.shown()
        whole, shown.local_workers = shown.local_workers, shown.local_workers[:2]
        injector(shown)
        assert not injector.injections
        shown.local_workers = whole
        injector(shown)
        assert {crew.next_end() for _ in range(2)} == {(0, -signal.SIGKILL), (2, -signal.SIGKILL)}


def test_stop_term_and_zygote_are_signals(tmp_path: Path) -> None:
    faults = [InjectedFault("stop", 1, 0), InjectedFault("term", 1, 1), InjectedFault("zygote", 1)]
    with tree(2, "wait", tmp_path) as crew, Injector(faults) as injector:
        shown = crew.shown()
        injector(shown)
        until(lambda: crew.state(0) == "T")
        injector(shown)
        assert len(injector.injections) == 1, "a generation is struck once"
        shown.generation = 1
        injector(shown)
        assert crew.next_end() == (1, -signal.SIGTERM)
        shown.generation = 2
        injector(shown)
        assert crew.process.wait(60) == -signal.SIGKILL
        assert [one.fault for one in injector.injections] == faults


def test_a_stranger_is_never_struck(tmp_path: Path) -> None:
    """Also where the kernel has given a worker's number to another process."""
    with pytest.raises(ProcessLookupError):
        TargetProcess(os.getppid())
    with tree(1, "wait", tmp_path) as crew, Injector([InjectedFault("kill", 1, 0)]) as injector:
        shown = crew.shown()
        shown.local_workers[0].pid = os.getppid()
        injector(shown)
        assert injector.missed == (InjectedFault("kill", 1, 0),)
        assert not injector.injections


def test_an_exception_is_raised_by_a_connection_that_fails(tmp_path: Path) -> None:
    with tree(1, "talk", tmp_path) as crew, Injector([InjectedFault("exception", 1, 0)]) as injector:
        until((tmp_path / "up-0").exists)
        injector(crew.shown())
        until(lambda: (tmp_path / "raised-0").exists() and bool((tmp_path / "raised-0").read_text()))
        assert (tmp_path / "raised-0").read_text() == "end BrokenPipeError"
        assert injector.injections[0].note == "2 connections shut down"
        assert is_alive(crew.pids[0])


def test_who_has_no_connection_cannot_lose_one(tmp_path: Path) -> None:
    with tree(1, "wait", tmp_path) as crew, Injector([InjectedFault("exception", 1, 0)]) as injector:
        injector(crew.shown())
        assert "no connection" in injector.injections[0].error


@has(FREEZER)
def test_a_hang_freezes_all_of_it_and_yields_to_a_fence(tmp_path: Path) -> None:
    with tree(1, "spin", tmp_path) as crew, Injector([InjectedFault("hang", 1, 0)]) as injector:
        shown = crew.shown()
        injector(shown)
        assert injector.injections[0].note == "frozen"
        before = _settled_cpu_s(crew)
        os.kill(crew.pids[0], signal.SIGCONT)  # would wake what SIGSTOP has stopped
        time.sleep(0.3)
        assert crew.cpu_s(0) == before
        assert crew.state(0) != "T"
        os.kill(crew.pids[0], signal.SIGKILL)
        assert crew.next_end() == (0, -signal.SIGKILL)
        until(lambda: injector(shown) is None)
    assert not groups_left()


def _settled_cpu_s(crew: Tree) -> float:
    """Once it has stopped counting: a freeze takes effect when the process next leaves the kernel."""
    last = -1.0
    while last != crew.cpu_s(0):
        last = crew.cpu_s(0)
        time.sleep(0.05)
    return last


@has(FREEZER)
def test_a_run_that_ends_early_finds_its_worker_thawed(tmp_path: Path) -> None:
    with tree(1, "spin", tmp_path) as crew:
        injector = Injector([InjectedFault("hang", 1, 0)])
        injector(crew.shown())
        before = _settled_cpu_s(crew)
        with pytest.raises(KeyboardInterrupt), injector:
            raise KeyboardInterrupt
        assert not groups_left()
        until(lambda: crew.cpu_s(0) > before)


@has(CPU)
def test_a_slow_worker_gets_its_share_and_then_all_again(tmp_path: Path) -> None:
    """Two workers for as many cores as others leave: only the kernel's own count of one's time is held to the quota."""
    with tree(1, "spin", tmp_path) as crew, Injector([InjectedFault("slow", 2, 0, steps=2, share=0.1)]) as injector:
        shown = crew.shown()
        injector(shown.at(2))
        started_at, before = time.monotonic(), crew.cpu_s(0)
        time.sleep(1.5)
        share = (crew.cpu_s(0) - before) / (time.monotonic() - started_at)
        assert share < 0.2
        injector(shown.at(3))
        assert groups_left()
        injector(shown.at(4))
        assert not groups_left()
        until(lambda: _share(crew, 0.3) > 2 * share, timeout_s=60)


def _share(crew: Tree, seconds: float) -> float:
    started_at, before = time.monotonic(), crew.cpu_s(0)
    time.sleep(seconds)
    return (crew.cpu_s(0) - before) / (time.monotonic() - started_at)


@has(MEMORY)
def test_the_kernel_kills_who_may_take_no_page_more(tmp_path: Path) -> None:
    with tree(2, "grow", tmp_path) as crew, Injector([InjectedFault("oom", 1, 1)]) as injector:
        kills = _num_oom_kills()
        shown = crew.shown()
        struck(injector, shown)
        assert crew.next_end() == (1, -signal.SIGKILL)
        assert injector.injections[0].note == "killed by the kernel's out-of-memory killer"
        assert _num_oom_kills() > kills
        until(lambda: injector(shown) is None)
        assert is_alive(crew.pids[0])
    assert not groups_left()


@has(MEMORY)
def test_who_dies_between_two_looks_of_one_turn_was_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once_it_is_dead(victim: TargetProcess) -> bool:
        until(lambda: is_dead(victim))
        return True

    is_dead = TargetProcess.is_dead.fget
    monkeypatch.setattr(TargetProcess, "is_dead", property(once_it_is_dead))
    with tree(1, "grow", tmp_path) as crew, Injector([InjectedFault("oom", 1, 0)]) as injector:
        injector(crew.shown())
        assert [strike.note for strike in injector.injections] == ["killed by the kernel's out-of-memory killer"]


def _num_oom_kills() -> int:
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@has(MEMORY)
def test_a_worker_that_asks_for_nothing_is_let_go_at_the_end(tmp_path: Path) -> None:
    with tree(1, "wait", tmp_path) as crew:
        with Injector([InjectedFault("oom", 1, 0)]) as injector:
            injector(crew.shown())
            assert injector.missed
        assert is_alive(crew.pids[0])
    assert not groups_left()


@has(FREEZER)
def test_what_a_killed_process_of_ours_left_is_swept(tmp_path: Path) -> None:
    from closeranks.elastic.faults.cgroups import find_cgroup_parent

    home = find_cgroup_parent(FREEZER).path
    with tree(1, "wait", tmp_path) as crew:
        left = home / f"closeranks-{crew.process.pid}-0"
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
    from tests.elastic.faults.crews import Phase

    with tree(1, "wait", tmp_path) as crew, Injector([InjectedFault("kill", 1, 0)]) as injector:
        shown = crew.shown()
        for state in ("starting", "closing ranks", "stopping"):
            shown.state = state
            injector(shown)
        shown.state = "running"
        for phase in (Phase.START, Phase.END):
            shown.local_workers[0].progress.phase = phase
            injector(shown)
        assert not injector.injections
        shown.local_workers[0].progress.phase = Phase.COMPUTE
        injector(shown)
        assert crew.next_end() == (0, -signal.SIGKILL)


def test_a_place_in_the_step_is_a_share_of_the_last_one(tmp_path: Path) -> None:
    with tree(1, "wait", tmp_path) as crew, Injector([InjectedFault("kill", 3, 0, at=0.5)]) as injector:
        shown = crew.shown()
        injector(shown.at(1))
        shown.now += 50.0
        shown.generation = 1  # what lies between two generations was no step
        injector(shown.at(2))
        injector(shown.at(3))  # the second step took 1 s
        shown.now += 0.4
        injector(shown)
        assert not injector.injections
        shown.now += 0.2
        injector(shown)
        assert injector.injections

"""The zygote: one thread, a working group, what it learns between two generations, who takes its place, and words for a
failed import.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan, RecoverySettings
from closeranks.agent.workers.worker_group import WorkerGroup
from closeranks.agent.workers.zygote import import_error
from closeranks.agent.workers.zygote_client import ZygoteClient
from closeranks.elastic.faults.cgroups import CgroupControl, ControlGroup, find_cgroup_parent
from tests.agent.conftest import Host
from tests.agent.crews import statuses, worlds_here
from tests.agent.traces import is_listening
from tests.agent.workers.test_worker_group import turn_until


@pytest.mark.world
def test_forked_workers_form_a_group_over_the_announced_store(host: Host) -> None:
    outcome = host.run(host.plan("torch_entries:reduce", 3))
    assert outcome.reason == "finished"
    assert {rank: event["total"] for rank, event in host.named("sum").items()} == {0: 6, 1: 6, 2: 6}
    assert not is_listening(host.named("sum")[0]["port"])
    assert host.notes == [], "torch leaves the zygote with one thread"


def test_the_agent_starts_without_torch_or_numpy() -> None:
    code = (
        "import sys, closeranks.agent.agent, closeranks.agent.workers.zygote;"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_words_for_a_failed_import() -> None:
    missing = ModuleNotFoundError("No module named 'theirs'", name="theirs")
    assert "there is no module 'theirs'" in str(import_error("theirs.models.big", missing))
    assert str(import_error("theirs", ModuleNotFoundError("No module named 'numba'", name="numba"))) == (
        "importing 'theirs' failed: ModuleNotFoundError: No module named 'numba'. Install 'numba'."
    )
    assert str(import_error("theirs", KeyError())) == "importing 'theirs' failed: KeyError."


@contextmanager
def standing(host: Host, warm: str = "learn") -> Iterator[tuple[LaunchPlan, ZygoteClient, EventLoop, AgentCallbacks]]:
    """A nursery that is ready, of a plan that survives."""
    host.log_folder.mkdir()
    listener = AgentCallbacks(lambda rank, event: host.events.append((rank, event)), lambda *_: None, host.notes.append)
    survival = RecoverySettings(
        FaultLimits(), lambda _: None, lambda _: "", warm_up=f"warm_entries:{warm}" if warm else ""
    )
    plan = host.plan("warm_entries:tell", 2, payload={"lesson": "forks"}, recovery_settings=survival)
    with EventLoop() as loop, ZygoteClient(plan, loop, listener) as nursery:
        turn_until(loop, lambda: nursery.is_ready)
        yield plan, nursery, loop, listener


def generations(host: Host, warm: str, num_generations: int = 2) -> list[dict[str, Any]]:
    """What rank 0 of each generation knows, when the zygote was asked to learn after the first was forked."""
    told: list[dict[str, Any]] = []
    with standing(host, warm) as (plan, nursery, loop, listener):
        for generation in range(num_generations):
            with WorkerGroup(plan, worlds_here(2, generation), nursery, loop, listener) as crew:
                turn_until(loop, lambda: crew.num_left == 0)
                assert statuses(crew) == {0: 0, 1: 0}
            told.append(host.named("knows")[0])
        assert nursery.error is None
    assert len({one["zygote"] for one in told}) == 1
    return told


@pytest.mark.world
def test_what_the_zygote_learns_is_known_to_the_next_generations_and_frozen(host: Host) -> None:
    told = generations(host, "learn", 3)
    assert [one["known"] for one in told] == [[], ["forks"], ["forks"]], "once, when the first were forked"
    assert told[1]["is_frozen"]
    assert "warmed up in" in (host.log_folder / "zygote.log").read_text()
    assert host.notes == []


@pytest.mark.world
@pytest.mark.parametrize(("lesson", "words"), [("fail", "ValueError: nothing to learn"), ("leave", "SystemExit: 3")])
def test_a_lesson_that_fails_is_a_note_in_the_zygotes_log(host: Host, lesson: str, words: str) -> None:
    told = generations(host, lesson)
    assert [one["known"] for one in told] == [[], []]
    log = (host.log_folder / "zygote.log").read_text()
    assert "warm-up failed" in log
    assert words in log


@pytest.mark.world
def test_a_plan_without_a_lesson_asks_for_none(host: Host) -> None:
    generations(host, "")
    assert (host.log_folder / "zygote.log").read_text() == ""


def until_gone(pids: list[int], loop: EventLoop | None = None) -> None:
    deadline = time.monotonic() + 5.0
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
        if loop is not None:
            loop.run_once(time.monotonic())


def heir_of(nursery: ZygoteClient, loop: EventLoop) -> int:
    """The process that would take the zygote's place."""
    deadline = time.monotonic() + 20.0
    while not (found := [one.pid for one in psutil.Process(nursery.pid).children() if os.getsid(one.pid) == one.pid]):
        assert time.monotonic() < deadline, "nobody was left in its place"
        loop.run_once(time.monotonic() + 0.02)
    loop.run_once(time.monotonic() + 0.1)
    return found[0]


@pytest.mark.world
class TestSpare:
    """A zygote that is killed has left another that knows as much, and workers need not wait for its imports."""

    def test_it_takes_the_place_of_one_that_was_killed(self, host: Host) -> None:
        heirs = []
        with standing(host) as (plan, nursery, loop, listener):
            for generation in range(3):
                with WorkerGroup(plan, worlds_here(2, generation), nursery, loop, listener) as crew:
                    turn_until(loop, lambda: crew.num_left == 0)
                    assert statuses(crew) == {0: 0, 1: 0}
                told = host.named("knows")[0]
                assert told["zygote"] == nursery.pid == (heirs[-1] if heirs else told["zygote"])
                assert told["known"] == (["forks"] if generation else [])
                heirs.append(heir_of(nursery, loop))
                os.kill(nursery.pid, signal.SIGKILL)
                turn_until(loop, lambda: nursery.error is not None)
                nursery.restart()
                assert nursery.is_ready
                assert nursery.error is None
        assert len(set(heirs)) == 3
        until_gone(heirs)

    def test_one_that_is_lost_itself_is_replaced_with_the_next_generation(self, host: Host) -> None:
        with standing(host) as (plan, nursery, loop, listener):
            heirs = []
            for generation in range(2):
                with WorkerGroup(plan, worlds_here(2, generation), nursery, loop, listener) as crew:
                    turn_until(loop, lambda: crew.num_left == 0)
                heirs.append(heir_of(nursery, loop))
                os.kill(heirs[-1], signal.SIGKILL)
                until_gone(heirs[-1:], loop)
            assert heirs[0] != heirs[1]
            os.kill(nursery.pid, signal.SIGKILL)
            turn_until(loop, lambda: nursery.error is not None)
            nursery.restart()
            assert not nursery.is_ready, "nobody is left who has imported anything"
            turn_until(loop, lambda: nursery.is_ready)

    def test_a_zygote_that_was_stopped_is_given_up_when_it_is_needed(self, host: Host) -> None:
        with standing(host) as (plan, nursery, loop, listener):
            with WorkerGroup(plan, worlds_here(1, 0), nursery, loop, listener) as crew:
                turn_until(loop, lambda: crew.num_left == 0)
            heir = heir_of(nursery, loop)
            os.kill(nursery.pid, signal.SIGSTOP)
            assert nursery.check_alive(time.monotonic() + 1e6) is None, "nobody waits for it"
            with WorkerGroup(plan, worlds_here(1, 1), nursery, loop, listener) as crew:
                deadline = time.monotonic() + 20.0
                while nursery.error is None:
                    assert time.monotonic() < deadline
                    loop.run_once(nursery.check_alive(time.monotonic()))
                assert "killed by SIGKILL" in str(nursery.error)
            nursery.restart()
            assert nursery.pid == heir
            with WorkerGroup(plan, worlds_here(1, 2), nursery, loop, listener) as crew:
                turn_until(loop, lambda: crew.num_left == 0)
                assert statuses(crew) == {0: 0}

    def test_one_killed_while_it_imports_again_is_replaced_once_more(self, host: Host) -> None:
        with standing(host) as (_, nursery, loop, _):
            for _ in range(3):  # no worker was forked, so that none has left an heir
                os.kill(nursery.pid, signal.SIGKILL)
                turn_until(loop, lambda: nursery.error is not None)
                assert nursery.was_ready
                nursery.restart()
            turn_until(loop, lambda: nursery.is_ready)

    def test_where_nobody_can_be_forked_the_reason_is_told_and_nobody_waits(self, host: Host) -> None:
        with standing(host) as (plan, nursery, loop, listener):
            group = ControlGroup(find_cgroup_parent(CgroupControl("pids", "pids", "pids.max", "pids.max")))
            try:
                group.write("pids.max", "1")
                group.add(nursery.pid)
                with WorkerGroup(plan, worlds_here(2, 0), nursery, loop, listener) as crew:
                    turn_until(loop, lambda: nursery.error is not None)
                    assert "a worker could not be forked (Resource temporarily unavailable)" in str(nursery.error)
                    crew.fence()
                    assert crew.num_left == 0
            finally:
                group.remove()

    def test_it_ends_when_the_agent_lets_go_of_it(self, host: Host) -> None:
        with standing(host) as (plan, nursery, loop, listener):
            with WorkerGroup(plan, worlds_here(1, 0), nursery, loop, listener) as crew:
                turn_until(loop, lambda: crew.num_left == 0)
            both = [nursery.pid, heir_of(nursery, loop)]
        until_gone(both)

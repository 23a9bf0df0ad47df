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
from tests.agent.traces import is_listening
from tests.agent.worker_groups import statuses, worlds_here
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
    """A zygote client that is ready, of a plan that recovers from faults."""
    host.log_folder.mkdir()
    callbacks = AgentCallbacks(
        lambda rank, event: host.events.append((rank, event)), lambda *_: None, host.notes.append
    )
    settings = RecoverySettings(
        FaultLimits(), lambda _: None, lambda _: "", warm_up=f"warm_entries:{warm}" if warm else ""
    )
    plan = host.plan("warm_entries:tell", 2, payload={"lesson": "forks"}, recovery_settings=settings)
    with EventLoop() as loop, ZygoteClient(plan, loop, callbacks) as zygote_client:
        turn_until(loop, lambda: zygote_client.is_ready)
        yield plan, zygote_client, loop, callbacks


def generations(host: Host, warm: str, num_generations: int = 2) -> list[dict[str, Any]]:
    """What rank 0 of each generation knows, when the zygote was asked to learn after the first was forked."""
    told: list[dict[str, Any]] = []
    with standing(host, warm) as (plan, zygote_client, loop, callbacks):
        for generation in range(num_generations):
            with WorkerGroup(plan, worlds_here(2, generation), zygote_client, loop, callbacks) as worker_group:
                turn_until(loop, lambda: worker_group.num_left == 0)
                assert statuses(worker_group) == {0: 0, 1: 0}
            told.append(host.named("knows")[0])
        assert zygote_client.error is None
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
    deadline = time.monotonic() + 120.0
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
        if loop is not None:
            loop.run_once(time.monotonic())


def standby_of(zygote_client: ZygoteClient, loop: EventLoop) -> int:
    """The process that would take the zygote's place."""
    deadline = time.monotonic() + 120.0
    while not (
        found := [one.pid for one in psutil.Process(zygote_client.pid).children() if os.getsid(one.pid) == one.pid]
    ):
        assert time.monotonic() < deadline, "nobody was left in its place"
        loop.run_once(time.monotonic() + 0.02)
    loop.run_once(time.monotonic() + 0.1)
    return found[0]


@pytest.mark.world
class TestSpare:
    """A zygote that is killed has left another that knows as much, and workers need not wait for its imports."""

    def test_it_takes_the_place_of_one_that_was_killed(self, host: Host) -> None:
        standbys = []
        with standing(host) as (plan, zygote_client, loop, callbacks):
            for generation in range(3):
                with WorkerGroup(plan, worlds_here(2, generation), zygote_client, loop, callbacks) as worker_group:
                    turn_until(loop, lambda: worker_group.num_left == 0)
                    assert statuses(worker_group) == {0: 0, 1: 0}
                told = host.named("knows")[0]
                assert told["zygote"] == zygote_client.pid == (standbys[-1] if standbys else told["zygote"])
                assert told["known"] == (["forks"] if generation else [])
                standbys.append(standby_of(zygote_client, loop))
                os.kill(zygote_client.pid, signal.SIGKILL)
                turn_until(loop, lambda: zygote_client.error is not None)
                zygote_client.restart()
                assert zygote_client.is_ready
                assert zygote_client.error is None
        assert len(set(standbys)) == 3
        until_gone(standbys)

    def test_one_that_is_lost_itself_is_replaced_with_the_next_generation(self, host: Host) -> None:
        with standing(host) as (plan, zygote_client, loop, callbacks):
            standbys = []
            for generation in range(2):
                with WorkerGroup(plan, worlds_here(2, generation), zygote_client, loop, callbacks) as worker_group:
                    turn_until(loop, lambda: worker_group.num_left == 0)
                standbys.append(standby_of(zygote_client, loop))
                os.kill(standbys[-1], signal.SIGKILL)
                until_gone(standbys[-1:], loop)
            assert standbys[0] != standbys[1]
            os.kill(zygote_client.pid, signal.SIGKILL)
            turn_until(loop, lambda: zygote_client.error is not None)
            zygote_client.restart()
            assert not zygote_client.is_ready, "nobody is left who has imported anything"
            turn_until(loop, lambda: zygote_client.is_ready)

    def test_a_zygote_that_was_stopped_is_given_up_when_it_is_needed(self, host: Host) -> None:
        with standing(host) as (plan, zygote_client, loop, callbacks):
            with WorkerGroup(plan, worlds_here(1, 0), zygote_client, loop, callbacks) as worker_group:
                turn_until(loop, lambda: worker_group.num_left == 0)
            standby = standby_of(zygote_client, loop)
            os.kill(zygote_client.pid, signal.SIGSTOP)
            assert zygote_client.check_alive(time.monotonic() + 1e6) is None, "nobody waits for it"
            with WorkerGroup(plan, worlds_here(1, 1), zygote_client, loop, callbacks) as worker_group:
                deadline = time.monotonic() + 120.0
                while zygote_client.error is None:
                    assert time.monotonic() < deadline
                    loop.run_once(zygote_client.check_alive(time.monotonic()))
                assert "killed by SIGKILL" in str(zygote_client.error)
            zygote_client.restart()
            assert zygote_client.pid == standby
            with WorkerGroup(plan, worlds_here(1, 2), zygote_client, loop, callbacks) as worker_group:
                turn_until(loop, lambda: worker_group.num_left == 0)
                assert statuses(worker_group) == {0: 0}

    def test_one_killed_while_it_imports_again_is_replaced_once_more(self, host: Host) -> None:
        with standing(host) as (_, zygote_client, loop, _):
            for _ in range(3):  # no worker was forked, so that there is no standby
                os.kill(zygote_client.pid, signal.SIGKILL)
                turn_until(loop, lambda: zygote_client.error is not None)
                assert zygote_client.was_ready
                zygote_client.restart()
            turn_until(loop, lambda: zygote_client.is_ready)

    def test_where_nobody_can_be_forked_the_reason_is_told_and_nobody_waits(self, host: Host) -> None:
        with standing(host) as (plan, zygote_client, loop, callbacks):
            group = ControlGroup(find_cgroup_parent(CgroupControl("pids", "pids", "pids.max", "pids.max")))
            try:
                group.write("pids.max", "1")
                group.add(zygote_client.pid)
                with WorkerGroup(plan, worlds_here(2, 0), zygote_client, loop, callbacks) as worker_group:
                    turn_until(loop, lambda: zygote_client.error is not None)
                    assert "a worker could not be forked (Resource temporarily unavailable)" in str(zygote_client.error)
                    worker_group.fence()
                    assert worker_group.num_left == 0
            finally:
                group.remove()

    def test_it_ends_when_the_agent_lets_go_of_it(self, host: Host) -> None:
        with standing(host) as (plan, zygote_client, loop, callbacks):
            with WorkerGroup(plan, worlds_here(1, 0), zygote_client, loop, callbacks) as worker_group:
                turn_until(loop, lambda: worker_group.num_left == 0)
            both = [zygote_client.pid, standby_of(zygote_client, loop)]
        until_gone(both)

"""Worker groups of several generations from one zygote: what a recovery is made of."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan
from closeranks.agent.workers.worker_group import WorkerGroup
from closeranks.agent.workers.zygote_client import ZygoteClient
from tests.agent.conftest import Host
from tests.agent.worker_groups import statuses, worlds_here

pytestmark = pytest.mark.world


def turn_until(loop: EventLoop, is_done: Any) -> None:
    deadline = time.monotonic() + 120.0
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened for two minutes"
        loop.run_once(deadline)


def test_a_second_generation_is_forked_after_the_first_was_fenced(host: Host) -> None:
    host.log_folder.mkdir()
    callbacks = AgentCallbacks(
        lambda rank, event: host.events.append((rank, event)), lambda *_: None, host.notes.append
    )
    plan: LaunchPlan = host.plan("hang", 3)
    with EventLoop() as loop, ZygoteClient(plan, loop, callbacks) as zygote_client:
        turn_until(loop, lambda: zygote_client.is_ready)
        pids: list[set[int]] = []
        for generation in range(3):
            with WorkerGroup(plan, worlds_here(3, generation), zygote_client, loop, callbacks) as group:
                turn_until(loop, lambda: len(host.events) == 3)
                pids.append({event["pid"] for _, event in host.events})
                assert {worker.world.generation for worker in group.workers} == {generation}
                host.events.clear()
                group.fence()
                turn_until(loop, lambda: group.num_left == 0)
                assert statuses(group) == dict.fromkeys(range(3), -signal.SIGKILL)
                assert group.failed_at is None, "whom we killed did not fail"
        assert len(set.union(*pids)) == 9
        assert zygote_client.error is None


def test_a_crew_fenced_while_it_is_forked_leaves_nobody(host: Host) -> None:
    host.log_folder.mkdir()
    callbacks = AgentCallbacks(lambda *_: None, lambda *_: None, host.notes.append)
    plan = host.plan("hang", 8)
    with EventLoop() as loop, ZygoteClient(plan, loop, callbacks) as zygote_client:
        turn_until(loop, lambda: zygote_client.is_ready)
        with WorkerGroup(plan, worlds_here(plan.num_workers, 0), zygote_client, loop, callbacks) as group:
            group.fence()
            turn_until(loop, lambda: group.num_left == 0)
            assert set(statuses(group).values()) == {-signal.SIGKILL}


def test_leaving_a_crew_ends_it(host: Host) -> None:
    host.log_folder.mkdir()
    callbacks = AgentCallbacks(lambda *_: None, lambda *_: None, host.notes.append)
    plan = host.plan("hang", 2)
    with EventLoop() as loop, ZygoteClient(plan, loop, callbacks) as zygote_client:
        turn_until(loop, lambda: zygote_client.is_ready)
        with WorkerGroup(plan, worlds_here(plan.num_workers, 0), zygote_client, loop, callbacks) as group:
            turn_until(loop, lambda: all(worker.pid for worker in group.workers))
        assert group.num_left == 0

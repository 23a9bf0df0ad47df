"""Runs against real processes and real signals: how they end, what is said, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.agent import Agent
from closeranks.agent.config import AgentConfig
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job_view import JobView
from closeranks.agent.launch_plan import RecoverySettings, ResizedLaunch
from closeranks.core.errors import DataError, RunFailed, SetupError, UserError

from .conftest import Host
from .traces import await_end, exists, is_listening, processes_marked

pytestmark = pytest.mark.world


def test_workers_know_their_world_and_find_the_store(host: Host) -> None:
    outcome = host.run(host.plan("finish", 3, payload={"lr": 0.1, "names": ["a"]}))
    assert (outcome.reason, outcome.statuses) == ("finished", {0: 0, 1: 0, 2: 0})
    ready, store = host.named("ready"), host.named("store")
    assert [ready[rank]["world"] for rank in range(3)] == [[rank, 3, "agent"] for rank in range(3)]
    assert all(event["payload"] == {"lr": 0.1, "names": ["a"]} for event in ready.values())
    addresses = {event["address"] for event in store.values()}
    assert len(addresses) == 1
    assert not is_listening(int(addresses.pop().rpartition(":")[2]))
    assert not any(exists(event["pid"]) for event in ready.values())


def test_each_session_of_a_script_finds_its_own_store(host: Host, tmp_path: Path) -> None:
    outcome = host.run(host.plan("meet_twice", 2, payload={"folder": str(tmp_path)}))
    assert outcome.statuses == {0: 0, 1: 0}
    first, second = host.named("first"), host.named("second")
    assert (
        len({event["address"] for event in first.values()}) == len({event["address"] for event in second.values()}) == 1
    )
    assert (len(first), len(second)) == (2, 2)


def test_a_worker_holds_only_what_is_its_own(host: Host) -> None:
    host.run(host.plan("describe_self", 3))
    for rank, event in host.events:
        assert event["fds"] == ["/dev/null", "pipe", "pipe"]
        assert event["num_fds"] == 6, "stdin, stdout, stderr, the link, the progress word and the record of collectives"
        assert event["session"] != os.getsid(0), "Ctrl-C in a terminal must reach the agent alone"
        assert event["ignores_sigint"]
        assert event["detected"] == ["agent", rank]
        assert event["argv"] == 1
    assert len({event["parent"] for _, event in host.events}) == 1


def test_a_payload_larger_than_a_socket_buffer_arrives(host: Host) -> None:
    payload = {"text": "ä" * 1_000_000}
    host.run(host.plan("finish", 2, payload=payload))
    assert all(event["payload"] == payload for event in host.named("ready").values())


def test_output_goes_to_the_logs_and_rank_0_is_heard(host: Host) -> None:
    host.run(host.plan("say"))
    assert host.lines == ["rank 0 says grüß", "on stderr", "no newline at the end"]
    text = (host.log_folder / "rank-00001.log").read_text()
    assert text == "rank 1 says grüß\non stderr\nno newline at the end"


def test_an_exception_ends_the_run_with_one_report(host: Host) -> None:
    with pytest.raises(RunFailed) as caught:
        host.run(host.plan("stumble", 4))
    first, others, log = str(caught.value).splitlines()
    assert first.startswith("rank 1 of 4 failed at step 7: ValueError: the loss is a banana (")
    assert "entries.py:" in first
    assert first.endswith(" in stumble)")
    assert others == "ranks 0, 2 and 3 stopped because of it"
    assert log.endswith(str(host.log_folder / "rank-00001.log"))
    assert "ValueError: the loss is a banana" in (host.log_folder / "rank-00001.log").read_text()
    assert (caught.value.rank, caught.value.step) == (1, 7)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ([["hang", 0], ["sys.exit", 3]], "rank 1 of 2 failed before its first step: sys.exit(3) was called ("),
        ([["os._exit", 4], ["hang", 0]], "rank 0 of 2 failed before its first step (starting): exited with code 4"),
        ([["return", 5], ["hang", 0]], "rank 0 of 2 failed before its first step (starting): exited with code 5"),
        ([["sys.exit", 0], ["hang", 0]], "rank 0 of 2 failed before its first step: sys.exit(0) was called ("),
        ([["hang", 0], ["sys.exit", None]], "rank 1 of 2 failed before its first step: sys.exit() was called ("),
        ([["hang", 0], ["os._exit", 0]], "rank 1 of 2 failed before its first step (starting): exited with code 0"),
    ],
)
def test_a_way_out_that_is_no_success(host: Host, ways: list[Any], words: str) -> None:
    with pytest.raises(RunFailed) as caught:
        host.run(host.plan("leave", payload={"ways": ways}))
    assert str(caught.value).startswith(words)


def test_ways_out_that_are_successes(host: Host) -> None:
    assert host.run(host.plan("leave", 2, payload={"ways": [["return", 0]] * 2})).statuses == {0: 0, 1: 0}
    script = replace(host.plan("leave", 2, payload={"ways": [["return", 0], ["os._exit", 0]]}), must_finish=False)
    assert host.run(script).statuses == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("name", "words"),
    [("SIGKILL", "out-of-memory"), ("SIGSEGV", "a crash in native code"), ("SIGABRT", "native code called abort()")],
)
def test_a_silent_death_is_blamed_before_its_echoes(host: Host, tmp_path: Path, name: str, words: str) -> None:
    for rank in (0, 2):
        os.mkfifo(tmp_path / f"fifo-{rank}")
    with pytest.raises(RunFailed) as caught:
        host.run(host.plan("die", 3, payload={"folder": str(tmp_path), "signal": name}))
    first, others, *log = str(caught.value).splitlines()
    assert first.startswith("rank 1 of 3 failed at step 12 (reducing gradients): ")
    assert name in first
    assert words in first
    assert others == "ranks 0 and 2 stopped because of it"
    assert any("my last words" in line for line in log)
    assert len(host.named("peer lost")) == 2


def test_a_rank_that_somebody_kills_is_seen_at_once(host: Host) -> None:
    killed_at = 0.0

    def kill(rank: int, event: dict[str, Any]) -> None:
        nonlocal killed_at
        if rank == 1:
            killed_at = time.monotonic()
            os.kill(event["pid"], signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"rank 1 of 3 failed before its first step .*: killed by SIGKILL"):
        host.run(host.plan("hang", 3), kill)
    assert time.monotonic() - killed_at < 120.0, "those that hang would never end"


def test_ctrl_c_on_a_hung_run_clears_it_when_patience_ends(host: Host) -> None:
    asked_at = 0.0

    def interrupt(rank: int, event: dict[str, Any]) -> None:
        nonlocal asked_at
        if len(host.events) == 2:
            asked_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

    outcome = host.run(host.plan("hang"), interrupt)
    assert time.monotonic() - asked_at > 1.4, "it had its patience"
    assert outcome.reason == "interrupted"
    assert outcome.statuses == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert host.notes[0].startswith("Ctrl-C: finishing the step and saving, for at most 1.5 s.")
    assert host.notes[-1] == "Killed before they were done: ranks 0, 1."  # and no word of a save: there is none
    assert not any(exists(event["pid"]) for _, event in host.events)


@pytest.mark.parametrize(
    ("event", "stands"),
    [
        ({"event": "saved", "step": 4}, True),
        ({"event": "resumed", "step": 4}, True),
        ({"event": "resumed", "step": 0}, False),
        ({"event": "save_failed", "step": 4}, False),
    ],
)
def test_the_last_save_is_named_where_there_is_one(host: Host, event: dict[str, Any], stands: bool) -> None:
    def interrupt(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            os.kill(os.getpid(), signal.SIGINT)

    host.run(host.plan("hang", 1, AgentConfig(interrupt_s=0.1), payload={"before": [event]}), interrupt)
    assert (host.notes[-1] == "Killed before they were done: rank 0. The last checkpoint is valid.") is stands
    assert host.notes[-1].startswith("Killed before they were done: rank 0.")


def test_a_second_ctrl_c_kills_at_once(host: Host) -> None:
    def interrupt(rank: int, event: dict[str, Any]) -> None:
        if len(host.events) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    plan = host.plan("hang", config=AgentConfig(interrupt_s=300.0))
    started_at = time.monotonic()
    # Signals of one kind that are pending together are one: the note of the first brings the second.
    host.notes = _Replying(signal.SIGINT)
    assert host.run(plan, interrupt).reason == "interrupted"
    assert time.monotonic() - started_at < 200.0


class _Replying(list[str]):
    """Sends a signal once, when the first note arrives."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def append(self, note: str) -> None:
        super().append(note)
        if len(self) == 1:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "drained"), (signal.SIGINT, "interrupted"), (signal.SIGHUP, "disconnected")],
)
def test_a_drained_run_saves_and_leaves_by_itself(host: Host, number: int, reason: str) -> None:
    def ask(rank: int, event: dict[str, Any]) -> None:
        if len(host.named("ready")) == 2 and event["event"] == "ready":
            os.kill(os.getpid(), number)

    outcome = host.run(host.plan("drain", config=AgentConfig(interrupt_s=30.0)), ask)
    assert (outcome.reason, outcome.statuses) == (reason, {0: 0, 1: 0})
    assert host.named("saved") == {rank: {"event": "saved"} for rank in range(2)}


@pytest.mark.parametrize(
    ("piece", "num_bytes", "shown_in_s"),
    [("\r 37%|###     |", 10_000_000, 0.0), ("a line of output\n", 2_000_000, 0.02)],
    ids=["a progress bar", "lines on a slow terminal"],
)
def test_a_worker_that_prints_much_is_not_taken_for_hung(
    host: Host, piece: str, num_bytes: int, shown_in_s: float
) -> None:
    """It waits for its pipe to be read, longer than a step ever took, and is healthy."""
    limits = FaultLimits(hang_floor_s=0.4, hang_factor=2.0, max_faults=0)
    survival = RecoverySettings(limits, lambda num, wanted: ResizedLaunch(num, {}), lambda step: "")
    plan = host.plan(
        "print_much", payload={"piece": piece, "num_bytes": num_bytes}, is_elastic=True, recovery_settings=survival
    )
    outcome = Agent(
        plan,
        on_event=lambda rank, event: host.events.append((rank, event)),
        on_output=lambda rank, text: time.sleep(shown_in_s),
        on_note=host.notes.append,
    ).run()
    assert (outcome.reason, outcome.statuses) == ("finished", {0: 0, 1: 0}), host.notes
    assert (host.log_folder / "rank-00000.log").stat().st_size == num_bytes - num_bytes % len(piece), "byte for byte"


def test_ps_shows_rank_and_run(host: Host) -> None:
    host.run(host.plan("show_title"))
    run = host.log_folder.parent
    for rank in range(2):
        worker, zygote = host.named("titles")[rank]["titles"]
        assert f"closeranks: rank {rank} of 2, {run}".startswith(worker)
        assert worker.startswith(f"closeranks: rank {rank} of 2, /")
        assert zygote.startswith("closeranks: zygote, /")


def test_what_workers_leave_running_is_named_and_ended(host: Host, tmp_path: Path) -> None:
    assert host.run(host.plan("leave_daemons", 1, payload={"folder": str(tmp_path)})).reason == "finished"
    pids = host.named("left")[0]["pids"]
    assert not any(exists(pid) for pid in pids)
    named, killed = host.notes
    assert named.startswith("Ending processes that the run's code started and left running: ")
    assert f"{pids[0]} (sleep 1000)" in named
    assert f"{pids[1]} (" in named
    assert killed == f"Killing those that did not end: {pids[1]}."


def test_sigterm_to_a_worker_drains_it(host: Host) -> None:
    def ask(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            os.kill(event["pid"], signal.SIGTERM)

    assert host.run(host.plan("drain"), ask).reason == "drained"


def test_sigterm_to_a_worker_that_was_just_forked_is_not_lost(host: Host) -> None:
    """It has no handler yet; without the signal it would wait for ever."""
    struck: list[int] = []

    def strike(view: JobView) -> None:
        for one in view.local_workers:
            if one.pid is not None and not struck:
                struck.append(one.pid)
                os.kill(one.pid, signal.SIGTERM)

    ignore = dict.fromkeys(("on_event", "on_output", "on_note"), lambda *_: None)
    assert Agent(host.plan("drain", num_workers=1), on_tick=strike, **ignore).run().reason == "drained"


def test_a_save_that_fails_in_a_drain_is_a_failure(host: Host) -> None:
    def ask(rank: int, event: dict[str, Any]) -> None:
        if len(host.events) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunFailed, match="No space left on device"):
        host.run(host.plan("fail_to_save"), ask)


def test_ctrl_c_while_modules_are_imported(host: Host, tmp_path: Path) -> None:
    """Nothing has started, so there is nothing to wait for. The module itself sends the signal: no race."""
    (tmp_path / "slow.py").write_text(f"import os, threading; os.kill({os.getpid()}, 2); threading.Event().wait()")
    outcome = host.run(host.plan("finish", preload=("slow",), sys_path=(str(tmp_path),)))
    assert (outcome.reason, outcome.statuses) == ("interrupted", {})
    assert host.notes == ["Ctrl-C: stopping now."]


def test_a_users_mistake_is_said_once(host: Host) -> None:
    with pytest.raises(DataError) as caught:
        host.run(host.plan("misuse", 3, payload={"ranks": "all"}))
    assert str(caught.value) == "the folder /nowhere holds no data. Set data.path to a folder that does."
    assert caught.value.exit_code == 2
    assert host.lines == [], "no traceback reaches the terminal"
    assert "DataError: the folder" in (host.log_folder / "rank-00000.log").read_text()


def test_a_users_mistake_on_one_rank_names_it(host: Host) -> None:
    with pytest.raises(DataError, match=r"holds no data \(rank 1\)\. Set"):
        host.run(host.plan("misuse", 3, payload={"ranks": [1]}))


def test_a_store_announced_after_a_worker_died_does_not_hide_the_cause(host: Host, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to read"):
        host.run(host.plan("announce_after_a_death", 2, payload={"note": str(tmp_path / "note")}))


def test_a_busy_port_is_told_in_one_sentence(host: Host) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} on 127.0.0.1 is already in use"):
            host.run(host.plan("bind", config=AgentConfig(port=port)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "\nraise ValueError('one\\ntwo')",
            r"importing 'theirs' failed at .*theirs\.py:2 .*: ValueError: two",
        ),
        ("def f(:\n  pass", r"importing 'theirs' failed at .*theirs\.py:1: SyntaxError: "),
        ("import nowhere_to_be_found", r"theirs\.py:1 .*No module named 'nowhere_to_be_found'\. Install 'nowhere_"),
        ("import sys\nsys.exit(1)", r"importing 'theirs' called sys\.exit at .*theirs\.py:2 .*__main__"),
    ],
)
def test_a_module_that_cannot_be_imported(host: Host, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "theirs.py").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        host.run(host.plan("finish", preload=("theirs",), sys_path=(str(tmp_path),)))
    assert caught.value.exit_code == 2


def test_a_module_that_is_not_there(host: Host) -> None:
    with pytest.raises(UserError, match=r"there is no module 'not_here'\. Run from the folder"):
        host.run(host.plan("not_here.at_all:run"))


def test_an_entry_that_is_not_there(host: Host) -> None:
    with pytest.raises(UserError, match=r"has no 'finsh'. Did you mean 'finish'"):
        host.run(host.plan("finsh"))


def test_threads_started_by_an_import_are_told(host: Host, tmp_path: Path) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(f"import threading\nhelp = 1\n{start}{start}")
    (tmp_path / "mine.py").write_text(f"import json, threading\nfrom threaded import help\n{start}")
    plan = host.plan("finish", preload=("mine",))
    plan = host.plan("finish", preload=("mine",), sys_path=(*plan.sys_path, str(tmp_path)))
    assert host.run(plan).reason == "finished"
    assert "Importing threaded started 2 threads and mine started 1 thread in the process" in host.notes[0]


def test_a_lost_zygote_is_the_culprit_not_its_workers(host: Host) -> None:
    def kill(rank: int, event: dict[str, Any]) -> None:
        if len(host.events) == 2:
            parent = int(Path(f"/proc/{event['pid']}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)

    with pytest.raises(RunFailed, match="the zygote, the process that workers are forked from, was lost: killed"):
        host.run(host.plan("hang"), kill)
    await_end([event["pid"] for _, event in host.events], timeout_s=120.0)


def test_a_zygote_that_dies_while_importing(host: Host, tmp_path: Path) -> None:
    (tmp_path / "fatal.py").write_text("import os; print('so long', flush=True); os.kill(os.getpid(), 9)")
    with pytest.raises(RunFailed, match=r"was lost while it imported fatal, entries: killed by SIGKILL(.|\n)*so long"):
        host.run(host.plan("finish", preload=("fatal",), sys_path=(str(tmp_path),)))


def test_a_flood_of_events_arrives_in_order(host: Host) -> None:
    host.run(host.plan("flood", 2, payload={"num_events": 10_000}))
    for rank in range(2):
        heard = [event["index"] for sender, event in host.events if sender == rank]
        # A machine too busy to run the agent for a while may cost events, by design; each of them is owned up to.
        owned_up = sum(int(n) for note in host.notes for n in re.findall(rf"Rank {rank} dropped (\d+)", note))
        assert heard == sorted(set(heard))
        assert len(heard) + owned_up == 10_000
        assert len(heard) > 8_000


def test_a_listener_that_raises_leaves_nothing_behind(host: Host) -> None:
    def refuse(rank: int, event: dict[str, Any]) -> None:
        raise KeyError("a bug in a sink")

    with pytest.raises(KeyError, match="a bug in a sink"):
        host.run(host.plan("hang", 3), refuse)


def test_what_a_worker_started_dies_with_it(host: Host) -> None:
    def kill(rank: int, event: dict[str, Any]) -> None:
        os.kill(event["pid"], signal.SIGKILL)

    with pytest.raises(RunFailed, match="SIGKILL"):
        host.run(host.plan("bear", 1), kill)
    await_end([event["child"] for _, event in host.events], timeout_s=120.0)


def test_a_worker_may_fork_and_end_its_own_children(host: Host) -> None:
    assert host.run(host.plan("fork_child", 1)).reason == "finished"
    assert host.events == [(0, {"ended_by": signal.SIGTERM, "drain": False})]


def test_more_workers_than_a_control_queue_holds(host: Host) -> None:
    assert host.run(host.plan("finish", 24)).statuses == dict.fromkeys(range(24), 0)


def test_a_log_folder_that_cannot_be_made(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot be created"):
        host.run(host.plan("finish", log_folder=tmp_path / "file" / "logs"))


_SCRIPT = """
import json, os, sys
from pathlib import Path
from closeranks.agent.agent import Agent
from closeranks.agent.config import AgentConfig
from closeranks.agent.launch_plan import LaunchPlan

plan = LaunchPlan(num_workers=3, entry="entries:hang", log_folder=Path(sys.argv[1]), environment=dict(os.environ),
                  config=AgentConfig(), sys_path=(sys.argv[2],))
tell = lambda rank, event: print(json.dumps(event), flush=True)
Agent(plan, on_event=tell, on_output=lambda *_: None, on_note=lambda *_: None).run()
"""


def test_a_killed_agent_takes_everything_with_it(host: Host) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(host.log_folder), str(Path(__file__).parent)]
    environment = dict(host.plan("hang").environment)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as agent:
        assert agent.stdout is not None
        pids = [json.loads(agent.stdout.readline())["pid"] for _ in range(3)]
        family = processes_marked(host.marker)
        assert set(pids) < set(family)
        assert len(family) == 5, "agent, zygote and three workers"
        agent.kill()
    await_end(family, timeout_s=120.0)

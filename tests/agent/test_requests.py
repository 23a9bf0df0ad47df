"""A request of a kind that the package does not know reaches the votes of the workers of two hosts."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.agent.agent import Agent
from closeranks.agent.job_view import JobView
from closeranks.agent.transport.host_connections import JoinEndpoint
from closeranks.agent.transport.token import JobToken

from .conftest import Host
from .custom_request import CUSTOM

pytestmark = pytest.mark.world


def test_nothing_between_who_asks_and_who_acts_knows_kinds(host: Host, tmp_path: Path) -> None:
    token, second = secrets.token_hex(32), []
    endpoint = JoinEndpoint("127.0.0.1", 0, JobToken(token.encode()))
    plan = host.plan(
        "torch_entries:vote", 1, payload={"folder": str(tmp_path)}, num_hosts=2, max_hosts=2, join_endpoint=endpoint
    )

    def join(note: str) -> None:
        """The lead says how another host joins."""
        host.notes.append(note)
        if (found := re.search(r"--join (\S+)", note)) and not second:
            program = [sys.executable, str(Path(__file__).parent / "custom_request.py"), found[1], token]
            environment = {**os.environ, "CLOSERANKS_TEST": host.marker}
            second.append(subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL))

    asked: list[JobView] = []

    def ask(view: JobView) -> None:
        if host.named("ready") and not asked:
            asked.append(view)
            assert agent._controller is not None
            agent._controller.request(CUSTOM)

    agent = Agent(
        plan,
        on_event=lambda rank, event: host.events.append((rank, event)),
        on_output=lambda rank, text: host.lines.append(text),
        on_note=join,
        on_tick=ask,
    )
    try:
        assert agent.run().statuses == {0: 0, 1: 0}
        assert second[0].wait(60) == 0
    finally:
        for process in second:
            process.kill()
            process.wait()
    first, other = (json.loads((tmp_path / f"verdicts-{rank}.json").read_text()) for rank in range(2))
    assert first == other, "all ranks hear of it after the same step"
    begin = first.index(["custom"])
    assert first == [[]] * begin + [["custom"]] * (len(first) - begin)

"""Starts agents for tests, and looks after each whether anything was left behind."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.agent import Agent
from closeranks.agent.config import AgentConfig
from closeranks.agent.launch_plan import JobOutcome, LaunchPlan
from closeranks.core.system.environment import child_environment

from .traces import num_fds, processes_marked

OnEvent = Callable[[int, dict[str, Any]], None]


@dataclass
class Host:
    """One test's agent: what it starts, and all that was heard from it."""

    log_folder: Path
    marker: str
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plan(self, entry: str, num_workers: int = 2, config: AgentConfig | None = None, **changes: Any) -> LaunchPlan:
        settings: dict[str, Any] = {
            "entry": entry if ":" in entry else f"entries:{entry}",
            "num_workers": num_workers,
            "log_folder": self.log_folder,
            "environment": {**child_environment(1), "CLOSERANKS_TEST": self.marker},
            "sys_path": (str(Path(__file__).parent),),
            "config": config or AgentConfig(),
        }
        return LaunchPlan(**{**settings, **changes})

    def run(self, plan: LaunchPlan, on_event: OnEvent | None = None) -> JobOutcome:
        def hear(rank: int, event: dict[str, Any]) -> None:
            self.events.append((rank, event))
            if on_event is not None:
                on_event(rank, event)

        return Agent(
            plan,
            on_event=hear,
            on_output=lambda rank, text: self.lines.extend(text.split("\n")),
            on_note=self.notes.append,
        ).run()

    def named(self, name: str) -> dict[int, dict[str, Any]]:
        """The events of one name, by rank."""
        return {rank: event for rank, event in self.events if event.get("event") == name}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Fails the test afterwards if a process, descriptor or signal handler outlived the run."""
    host = Host(tmp_path / "logs", uuid.uuid4().hex)
    numbers = (signal.SIGINT, signal.SIGTERM)
    fds, handlers = num_fds(), [signal.getsignal(number) for number in numbers]
    yield host
    assert processes_marked(host.marker) == []
    assert num_fds() == fds
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert signal.set_wakeup_fd(-1) == -1

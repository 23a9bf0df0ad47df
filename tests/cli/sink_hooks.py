"""Hooks of jobs whose sinks are tested: they scrape the run's own endpoint, and kill its worker."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from typing import Any

from closeranks import Hook, Session

KILL_AT = 6
PATIENCE = 600


class ScrapedAndKilled(Hook):
    """Rank 0 of generation 0 is killed after a step. In both generations the endpoint has to show a step first; what it
    showed is noted in ``scrapes`` of the run folder."""

    def on_step(self, session: Session, step: Any) -> None:
        if not session.world.is_lead:
            return
        generation = session.world.generation
        if (generation, step.step) in ((0, KILL_AT), (1, KILL_AT + 3)):
            address, number = _scraped(session, step.step)
            _tracked(session, step.step - 1)
            with (session.folder / "scrapes").open("a") as file:
                file.write(json.dumps([generation, address, number]) + "\n")
            if generation == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class WaitsForWarnings(Hook):
    """Before it ends, the run has had time to notice that three sinks fail."""

    def on_step(self, session: Session, step: Any) -> None:
        pause = threading.Event()
        path = session.folder / "metrics" / "rank-00000.jsonl"
        for _ in range(PATIENCE if session.world.is_lead and step.step == 2 else 0):
            if path.read_text().count(" fails; training continues") == 3:
                return
            pause.wait(0.1)


def _tracked(session: Session, step: int) -> None:
    """MLflow's package takes a while to import, in each generation."""
    pause = threading.Event()
    for _ in range(PATIENCE):
        files = (session.folder.parent / "mlruns").glob("*/*/metrics/train/loss")
        if any(line.endswith(f" {step}") for path in files for line in path.read_text().splitlines()):
            return
        pause.wait(0.1)
    raise AssertionError("MLflow never got the step")


def _scraped(session: Session, least: int) -> tuple[str, int]:
    """The sink is on a thread of its own: ask until it has seen the step."""
    pause = threading.Event()
    for _ in range(PATIENCE):
        try:
            address = json.loads((session.folder / "sinks.json").read_text())["prometheus"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except (OSError, KeyError):
            pause.wait(0.1)
            continue
        found = [line for line in text.splitlines() if line.startswith("closeranks_run_step ")]
        if found and (number := int(float(found[0].split()[1]))) >= least:
            return address, number
        pause.wait(0.1)
    raise AssertionError("the endpoint never showed the step")

"""Floods of output from user code: nobody is taken for hung, nothing is lost, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Generator

from tests.hostile.cases import between, kind, one_of, step
from tests.hostile.checks import Problem
from tests.hostile.jobs import FLOODS
from tests.hostile.lab import Run


@kind("floods", rank=between(0, 1), step=step(1), what=one_of(*FLOODS), mib=one_of(1, 4, 16, 64))
def flood_of_output(run: Run, rank: int, step: int, what: str, mib: int) -> Generator[None]:
    run.settings.append("elastic.hang_floor_s=8")
    run.order(f"flood-{rank}-{step}-{what}-{mib}")
    yield
    yield
    events = run.folder / "metrics" / "agent.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    if hung := [line for line in lines if line["event"] == "rank_lost" and line["kind"] == "hang"]:
        raise Problem(f"a worker that only printed was given up as hung: {hung[0]}")

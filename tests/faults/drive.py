"""``closeranks train`` under faults in their usual notation and under those that only tests inject; what was injected
is written to ``strikes.json`` beside the job.

    python -m tests.faults.drive JOB NUM_WORKERS FAULTS AGENT_FAULTS [TABLE.KEY=VALUE]...
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from closeranks.agent.job_view import JobView
from closeranks.core.errors import CloseranksError
from closeranks.core.system import stdio
from closeranks.elastic.faults.grammar import parse_faults
from closeranks.elastic.faults.inject import Injector
from closeranks.run.job import launch
from closeranks.run.job.job import load_job
from closeranks.run.job.run_folder import choose_folder
from closeranks.telemetry.run_log.run_folder import RunFolder
from tests.faults.agent_faults import AgentInjector, decode


def drive(path: Path, num_workers: int, faults: str, agent_faults: str, settings: list[str]) -> int:
    folder = RunFolder(choose_folder(load_job(path, settings).value, path.stem))
    agent_injector = AgentInjector(decode(agent_faults))
    asked = parse_faults(faults).faults if faults else ()
    with Injector(asked, folder.checkpoints) as injector:

        def on_turn(view: JobView) -> float | None:
            return min((at for at in (injector(view), agent_injector(view)) if at is not None), default=None)

        try:
            launch.train(path, settings, num_workers, on_tick=on_turn)
        except CloseranksError as error:
            print(f"closeranks: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            _write_injections(path.with_name("strikes.json"), injector, agent_injector)
    return 0


def _write_injections(path: Path, injector: Injector, agent_injector: AgentInjector) -> None:
    injected = [{**asdict(one), "fault": str(one.fault)} for one in injector.injections]
    injected += [asdict(one) for one in agent_injector.done]
    injected.sort(key=lambda one: float(one["at"]))
    missed = [*map(str, injector.missed), *map(str, agent_injector.pending)]
    path.write_text(json.dumps({"struck": injected, "missed": missed}))


if __name__ == "__main__":
    stdio.ignore_broken_pipes(5.0)  # as the command line does
    job, num_workers, faults, agent_faults, *settings = sys.argv[1:]
    sys.exit(drive(Path(job), int(num_workers), faults, agent_faults, settings))

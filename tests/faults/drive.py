"""``closeranks train``, struck by faults that can be written down and by those that tests have of their own; what was
done is left in ``strikes.json`` beside the job.

    python -m tests.faults.drive JOB NUM_WORKERS FAULTS SPECIALS [TABLE.KEY=VALUE]...
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
from tests.faults.strikes import Strikes, decode


def drive(path: Path, num_workers: int, faults: str, specials: str, settings: list[str]) -> int:
    folder = RunFolder(choose_folder(load_job(path, settings).value, path.stem))
    strikes = Strikes(decode(specials))
    asked = parse_faults(faults).faults if faults else ()
    with Injector(asked, folder.checkpoints) as injector:

        def on_turn(view: JobView) -> float | None:
            return min((at for at in (injector(view), strikes(view)) if at is not None), default=None)

        try:
            launch.train(path, settings, num_workers, on_tick=on_turn)
        except CloseranksError as error:
            print(f"closeranks: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            _write_down(path.with_name("strikes.json"), injector, strikes)
    return 0


def _write_down(path: Path, injector: Injector, strikes: Strikes) -> None:
    struck = [{**asdict(strike), "fault": str(strike.fault)} for strike in injector.injections]
    struck += [asdict(strike) for strike in strikes.done]
    struck.sort(key=lambda strike: float(strike["at"]))
    missed = [*map(str, injector.missed), *map(str, strikes.pending)]
    path.write_text(json.dumps({"struck": struck, "missed": missed}))


if __name__ == "__main__":
    stdio.ignore_broken_pipes(5.0)  # as the command line does
    job, num_workers, faults, specials, *settings = sys.argv[1:]
    sys.exit(drive(Path(job), int(num_workers), faults, specials, settings))

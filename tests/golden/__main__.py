"""Compare what the code trains with the golden record, or make the record.

python -m tests.golden                    compare every job with the record
python -m tests.golden --against main~3   compare with what another commit trains, on this machine
python -m tests.golden --write            make the record
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.golden.baseline import Baseline, NoBaseline, baseline_for, made_by, unexplained
from tests.golden.jobs import GROUPS, JOBS, RESIZED, group_of
from tests.golden.record import FOLDER, Record, differences, environment, load, write
from tests.golden.running import made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="The golden record of training.")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", choices=[*JOBS, *RESIZED], default=[*JOBS, *RESIZED])
    parser.add_argument("--against", metavar="REVISION", help="compare with what this commit trains here")
    parser.add_argument("--write", action="store_true", help="make the record instead of comparing with it")
    parser.add_argument("--to", type=Path, metavar="FOLDER", default=FOLDER, help="with --write: where to")
    parser.add_argument("--because", metavar="REASON", help="with --write: why recorded bits change")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found = made(Path(folder), told.jobs)
    if told.write:
        return write_runs(found, told.to, told.because)
    try:
        baseline = _against(told.against, told.jobs) if told.against else baseline_for(found)
    except NoBaseline as error:
        print(error, file=sys.stderr)
        return 2
    return _compare(baseline, found)


def _against(revision: str, names: list[str]) -> Baseline:
    runs = made_by(revision, names)
    return Baseline(runs, dict.fromkeys(names, f"{revision}, run here"))


def _compare(baseline: Baseline, found: dict[str, Record]) -> int:
    other = 0
    for name, run in found.items():
        said = differences(baseline.runs[name], run) if name in baseline.runs else ["is not there to compare with"]
        print(f"{'other' if said else 'same '}  {name}   (with {baseline.words[name]})")
        for line in said[:8]:
            print(f"         {line}")
        if said[8:]:
            print(f"         and {len(said) - 8} more")
        other += bool(said)
    print(f"{len(found) - other} of {len(found)} runs are the same in every bit")
    return 1 if other else 0


def write_runs(found: dict[str, Record], folder: Path, because: str | None) -> int:
    """Runs that were not made now stay as they are recorded, which only holds on the machine of the record."""
    for group in GROUPS:
        runs = {name: run for name, run in found.items() if group_of(name) == group}
        if not runs:
            continue
        path, here = folder / f"{group}.json", environment()
        old = load(group, folder) if path.exists() else {"environment": here, "reasons": [], "runs": {}}
        if old["environment"] != here and not runs.keys() >= old["runs"].keys():
            return _refuse(f"{path} was made on another CPU or torch: write all of its jobs, or none.")
        reasons = [*old["reasons"], *([because] if because else [])]
        new = {"environment": here, "reasons": reasons, "runs": {**old["runs"], **runs}}
        if changed := unexplained(old, new):
            why = "Later commits do not edit the record. If the numbers must change, say why: --because."
            return _refuse(f"{path} records other bits of {', '.join(changed)}. {why}")
        write(path, new)
        print(f"wrote {path}: {len(runs)} runs")
    return 0


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

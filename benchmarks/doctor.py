"""Does the doctor find the cause of a slow run, and does it stay silent about healthy ones?

Runs are made slow on purpose in one way each, for real (``doctor_causes``; some need root, and are left out without
it). The first finding of ``closeranks doctor`` must be the planted cause, and healthy runs of other jobs must have no
finding. With ``--advice`` the changes that the doctor prints are applied, and the gain is compared with the one it
predicted.

    python benchmarks/doctor.py                         every planted cause with 3 seeds, and 20 healthy runs
    python benchmarks/doctor.py --only slow-decode --seeds 1
    python benchmarks/doctor.py --advice                apply the advice too
    python benchmarks/doctor.py --gpu                   the causes that show on one GPU only
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from doctor_causes import HEALTHY, HEALTHY_ON_GPU, PLANTED, PLANTED_ON_GPU, Planted
from doctor_places import Place, PlaceUnavailable, TrainCommand, here
from results import begin, conclude, say

from closeranks.core.errors import UserError
from closeranks.doctor.diagnose import Diagnosis, diagnose
from closeranks.doctor.finding import Finding
from closeranks.doctor.run_comparison import compare_runs
from closeranks.run.diagnosis import load_facts

LEAST_FOUND = 0.95
LEAST_RIGHT = 10 / 12
HEALTHY_SEEDS = 2


def main() -> None:
    args = _arguments()
    if args.gpu and not torch.cuda.is_available():
        raise UserError("there is no GPU here", "Leave --gpu out.")
    planted, healthy = (PLANTED_ON_GPU, HEALTHY_ON_GPU) if args.gpu else (PLANTED, HEALTHY)
    chosen = [one for one in planted if not args.only or one.name in args.only]
    if not chosen and args.only != ["healthy"]:
        raise UserError(f"nothing is called {', '.join(args.only)}", f"Known: {', '.join(p.name for p in planted)}.")
    with ExitStack() as stack:
        scratch = args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="closeranks-doctor-"))
        if args.advice:
            _conclude_advice([_advise(one, Path(scratch)) for one in chosen])
            return
        tried = [_plant(one, seed, Path(scratch)) for one in chosen for seed in range(args.seeds)]
        found = [one for one in tried if one is not None]
        controls = (
            healthy * (args.seeds if args.gpu else HEALTHY_SEEDS) if "healthy" in (args.only or ["healthy"]) else ()
        )
        silent = [_control(one, number, Path(scratch)) for number, one in enumerate(controls)]
    figures: dict[str, Any] = {
        "planted": len(found),
        "first": sum(found),
        "healthy": len(silent),
        "silent": sum(silent),
    }
    goal = f"the planted cause is the first finding in at least {LEAST_FOUND:.0%}, healthy runs have none"
    met = sum(found) >= LEAST_FOUND * len(found) and all(silent) and bool(silent)
    conclude("doctor", figures, goal, met)


def _plant(planted: Planted, seed: int, scratch: Path) -> bool | None:
    """Whether it is the first finding; None if this machine does not allow such a run."""
    folder = scratch / f"{planted.name}-{seed}"
    try:
        diagnosis = run_planted(planted, folder, f"run.seed={seed}")
    except PlaceUnavailable as error:
        say(f"  left out {planted.name:<22} {error}")
        return None
    is_right = bool(diagnosis.findings) and is_planted(planted, diagnosis.findings[0])
    say(f"  {'found ' if is_right else 'MISSED'}  {planted.name:<24} {_words(diagnosis.findings)}")
    return is_right


@dataclass(frozen=True, slots=True)
class Advised:
    """What following the first finding's advice was expected to save of a step, and what it saved."""

    name: str
    expected: float
    measured: float

    @property
    def is_right(self) -> bool:
        return self.expected / 2 <= self.measured <= self.expected * 2


def _advise(planted: Planted, scratch: Path) -> Advised | None:
    """Run as planted, then with the changes that the doctor printed; None if it advised no setting that gains speed."""
    arguments = [*planted.job, *planted.overrides]
    before, after = scratch / f"{planted.name}-before", scratch / f"{planted.name}-after"
    try:
        diagnosis = run_planted(planted, before)
    except PlaceUnavailable as error:
        say(f"  left out    {planted.name:<24} {error}")
        return None
    first = diagnosis.findings[0] if diagnosis.findings else None
    if first is None or not first.changes or not first.gain or planted.faults:
        say(f"  no setting  {planted.name}")
        return None
    changes = [str(change) for change in first.changes]
    later = run_job(after, [*arguments, *changes], planted.num_workers, place=planted.place)
    compared = compare_runs(load_facts(before), load_facts(after), diagnosis.findings[:1], later.findings)
    advised = Advised(planted.name, first.gain, 1 - 1 / (compared.measured or 1.0))
    words = f"{' '.join(changes)}: saves {advised.measured:.0%} of a step, expected {advised.expected:.0%}"
    say(f"  {'right ' if advised.is_right else 'WRONG '}  {planted.name:<24} {words}")
    return advised


def _conclude_advice(tried: Sequence[Advised | None]) -> None:
    advised = [one for one in tried if one is not None]
    right = sum(one.is_right for one in advised)
    figures = {
        "tried": len(advised),
        "right": right,
        "gains": {
            one.name: {"expected": round(one.expected, 3), "measured": round(one.measured, 3)} for one in advised
        },
    }
    goal = f"what the advice saves is within a factor of two of the prediction in {LEAST_RIGHT:.0%} of at least 12 runs"
    conclude("doctor-advice", figures, goal, len(advised) >= 12 and right >= LEAST_RIGHT * len(advised))


def _control(run: tuple[Sequence[str], Sequence[str], int], number: int, scratch: Path) -> bool:
    job, overrides, workers = run
    diagnosis = run_job(scratch / f"healthy-{number}", [*job, *overrides, f"run.seed={number}"], workers)
    say(f"  {'silent' if not diagnosis.findings else 'FALSE '}  healthy {number:<16} {_words(diagnosis.findings)}")
    return not diagnosis.findings


def is_planted(planted: Planted, finding: Finding) -> bool:
    return finding.cause == planted.cause and planted.says in " ".join((finding.what, *finding.evidence))


def _words(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{one.cause} {one.gain:.0%}" for one in findings) or "nothing"


def run_planted(planted: Planted, folder: Path, *overrides: str) -> Diagnosis:
    arguments = [*planted.job, *planted.overrides, *overrides]
    return run_job(folder, arguments, planted.num_workers, planted.faults, planted.place)


def run_job(
    folder: Path, arguments: Sequence[str], num_workers: int, faults: str = "", place: Place = here
) -> Diagnosis:
    job, *overrides = arguments
    printed = place(TrainCommand(job, overrides, folder, num_workers, faults))
    if not (folder / "metrics").is_dir():
        raise UserError(f"{job} {' '.join(overrides)} failed: {printed[-500:]}", "Run it by hand.")
    return diagnose(load_facts(folder))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="planted causes by name")
    parser.add_argument("--advice", action="store_true", help="apply the advice, and compare the gain")
    parser.add_argument("--gpu", action="store_true", help="the causes that show on a GPU, and healthy runs there")
    parser.add_argument("--keep", help="a folder for the runs, which is kept")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each planted cause")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

"""Does the doctor find the cause of a slow run, and does it stay silent about healthy ones?

Runs are made slow on purpose in one way each, for real: processes that sleep, compute, write and wait, limits of the
kernel, hosts with a slow link (``doctor_places``; some need root, and are left out without it). The first finding of
``closeranks doctor`` must be the planted cause, and healthy runs of other jobs must have no finding. With ``--advice``
the changes that the doctor prints are applied, and the gain is compared with the one it predicted.

    python benchmarks/doctor.py                         every planted cause with 3 seeds, and 20 healthy runs
    python benchmarks/doctor.py --only slow-decode --seeds 1
    python benchmarks/doctor.py --advice                apply the advice too
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doctor_places import Place, PlaceUnavailable, TrainCommand, beside_others, here, limited_cpus, slow_disk, two_hosts
from results import begin, conclude, say

from closeranks.core.errors import UserError
from closeranks.doctor.diagnose import Diagnosis, diagnose
from closeranks.doctor.finding import Finding
from closeranks.doctor.run_comparison import compare_runs
from closeranks.run.diagnosis import load_facts

LEAST_FOUND = 0.95
LEAST_RIGHT = 10 / 12
NUM_HEALTHY = 20
_QUICK = ("checkpoint.save=false", "telemetry.report=false", "optim.schedule.name=constant")

TINY = ("examples/tiny.toml", "train.steps=60", "train.eval_every=0", "train.eval_samples=24", *_QUICK)
"""A Llama of steps that take some 30 ms."""
OWN = ("benchmarks/doctor.toml", *_QUICK)
"""The MLP of ``doctor_work``."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A run that is slow, or wrong, for one known reason."""

    name: str
    cause: str
    job: Sequence[str]
    overrides: Sequence[str] = ()
    num_workers: int = 2
    faults: str = ""
    place: Place = here
    says: str = ""
    """Words of the finding that name this cause among others of its kind."""


PLANTED = (
    Planted("slow-store", "input-bound", OWN, ("data.args.fetch_s=0.002",)),
    Planted("slow-decode", "input-bound", OWN, ("data.args.decode=60",), num_workers=1),
    Planted("slow-collate", "input-bound", OWN, ('data.collate="doctor_work:slow_collate"',)),
    Planted("slow-rank", "straggler", TINY, (), faults="slow(rank=1, step=5, steps=200, share=0.3)"),
    Planted(
        "tiny-buckets",
        "small-collectives",
        OWN,
        ("sync.bucket_mib=0.002", "sync.first_bucket_mib=0.002", "model.args.hidden=64", "model.args.layers=60"),
    ),
    Planted("few-micro-batches", "pipeline-bubble", TINY, ("layout=pipeline=2", "train.micro_batch=12")),
    Planted("needless-recompute", "needless-recompute", TINY, ("train.recompute=full",), num_workers=1),
    Planted("blocking-saves", "save-stalls", OWN, ("checkpoint.save=true", 'run.hooks=["doctor_work:Saving"]')),
    Planted("garbage", "garbage-collection", TINY, ('run.hooks=["doctor_work:Garbage"]',)),
    Planted(
        "uneven-batches",
        "uneven-batches",
        OWN,
        ('data.name="doctor_work:unequal"', "~data.args", 'data.collate="doctor_work:pad"', "data.shuffle=none"),
    ),
    Planted(
        "fp16-overflow",
        "loss-scale",
        TINY,
        ("train.precision=fp16", "optim.loss_scale.interval=1", "optim.loss_scale.growth=1024"),
        num_workers=1,
    ),
    Planted("evaluation-every-step", "frequent-evaluation", TINY, ("train.eval_every=1", "train.eval_samples=48")),
    Planted("slow-hook", "user-code", TINY, ('run.hooks=["doctor_work:Slow"]',)),
    Planted("too-high-rate", "loss-diverged", TINY, ("optim.lr=1.0", "optim.clip=0", "optim.schedule.warmup=30"), 1),
    Planted("stopped-rank", "fault-stopped", TINY, (), faults="stop(rank=1, step=20)"),
    Planted("small-micro-batches", "small-micro-batch", OWN, ("train.micro_batch=1", "train.global_batch=64"), 1),
    Planted("blocked-loader", "fault-loader", OWN, ("data.args.blocks_at=7", "elastic.hang_floor_s=2")),
    Planted(
        "mismatched-collective",
        "fault-branch",
        OWN,
        ('model.loss="doctor_work:branching_loss"', "elastic.hang_floor_s=2"),
        says="all_gather",
    ),
    Planted(
        "cold-disk",
        "input-bound",
        OWN,
        ('data.name="doctor_work:cold"', "~data.args"),
        place=slow_disk(24 << 20),
        says="from the disk",
    ),
    Planted(
        "save-every-step",
        "slow-saves",
        OWN,
        ("checkpoint.save=true", "checkpoint.every=1", "train.steps=200"),
        place=slow_disk(8 << 20),
    ),
    Planted("cpu-limit", "cpu-limit", TINY, place=limited_cpus(0.4)),
    Planted("noisy-neighbour", "noisy-neighbour", TINY, place=beside_others(2)),
    Planted("slow-link", "exposed-communication", OWN, place=two_hosts(400), says="gradients travel"),
    Planted("tensor-across-hosts", "tensor-across-hosts", TINY, ("layout=tensor=2",), place=two_hosts(1000)),
)

HEALTHY = (
    (TINY, (), 2),
    (TINY, (), 1),
    (TINY, ("layout=zero=1",), 2),
    (TINY, ("layout=zero=3",), 2),
    (TINY, ("layout=pipeline=2", "train.micro_batch=1"), 2),
    (TINY, ("train.global_batch=48",), 2),
    (OWN, (), 2),
    (OWN, (), 1),
    (OWN, ("model.args.hidden=1024",), 2),
    (OWN, ("data.workers=1",), 1),
)


def main() -> None:
    args = _arguments()
    chosen = [one for one in PLANTED if not args.only or one.name in args.only]
    if not chosen and args.only != ["healthy"]:
        raise UserError(f"nothing is called {', '.join(args.only)}", f"Known: {', '.join(p.name for p in PLANTED)}.")
    with ExitStack() as stack:
        scratch = args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="closeranks-doctor-"))
        if args.advice:
            _conclude_advice([_advise(one, Path(scratch)) for one in chosen])
            return
        tried = [_plant(one, seed, Path(scratch)) for one in chosen for seed in range(args.seeds)]
        found = [one for one in tried if one is not None]
        numbers = range(NUM_HEALTHY) if not args.only or "healthy" in args.only else range(0)
        silent = [_control(number, Path(scratch)) for number in numbers]
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
    if planted.place is not here:
        return None
    arguments = [*planted.job, *planted.overrides]
    before, after = scratch / f"{planted.name}-before", scratch / f"{planted.name}-after"
    diagnosis = run_planted(planted, before)
    first = diagnosis.findings[0] if diagnosis.findings else None
    if first is None or not first.changes or not first.gain or planted.faults:
        say(f"  no setting  {planted.name}")
        return None
    changes = [str(change) for change in first.changes]
    later = run_job(after, [*arguments, *changes], planted.num_workers)
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


def _control(number: int, scratch: Path) -> bool:
    job, overrides, workers = HEALTHY[number % len(HEALTHY)]
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
    parser.add_argument("--keep", help="a folder for the runs, which is kept")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each planted cause")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

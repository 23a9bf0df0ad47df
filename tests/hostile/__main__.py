"""A campaign of hostile cases: ``make hostile``, or ``make hostile SEED=7 CASE=42`` for one of them again.

    python -m tests.hostile [--seed N] [--case N] [--count N] [--reduced] [--only TEXT] [--keep]

Prints the seed, one line for each case as it ends, a table by kind, and one line of JSON. Exit 0: every case came out
as docs/faults.md promises. Two cases run at once; each is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.hostile import checks, kinds  # noqa: F401  (registers every kind)
from tests.hostile.cases import KINDS, Case, draw, reduced
from tests.hostile.checks import Problem
from tests.hostile.lab import TIMEOUT_S, Lab, play, reference

COUNT = 220
AT_ONCE = 2
CONTROL = "control: another seed"
GOAL = "every case ends as docs/faults.md promises, the last state equal in every bit, nothing left behind"


@dataclass(frozen=True)
class Outcome:
    kind: str
    line: str
    seconds: float
    problem: str = ""
    skipped: str = ""
    repeat: str = ""

    @property
    def verdict(self) -> str:
        return "FAILED" if self.problem else "skipped" if self.skipped else "ok"

    def __str__(self) -> str:
        told = f"{self.verdict:<8}{self.seconds:6.1f} s  {self.line}"
        return told + (f"\n    {self.problem}\n    repeat: {self.repeat}" if self.problem else f"  {self.skipped}")


# --- one case, in a process of its own


def do(case: Case, root: Path) -> str:
    """What is wrong with it; empty where nothing is."""
    lab = Lab(root / f"case-{case.index}", root / "references", case.shape)
    try:
        play(lab, case, lab.isolate())
    except Problem as problem:
        return str(problem)
    except Exception:
        return f"the case itself failed: {traceback.format_exc()}"
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
    return ""


# --- all of them


def attempt(case: Case, root: Path, keep: bool) -> Outcome:
    began_at, line = time.monotonic(), f"case {case.index:<4} {case}"
    reasons = [KINDS[blow.kind].needs() for blow in case.blows]
    if any(reasons):
        return Outcome(case.kind, line, 0.0, skipped=" ".join(filter(None, reasons)))
    words = ["--seed", case.seed, "--case", case.index, "--within", root]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile", *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    try:
        problem, _ = process.communicate(timeout=4 * TIMEOUT_S)
        problem = problem.strip() or ("" if process.returncode == 0 else f"its process ended with {process.returncode}")
    except subprocess.TimeoutExpired:
        process.kill()
        problem = f"the case has not ended in {4 * TIMEOUT_S:g} s"
    if not (keep and problem):
        shutil.rmtree(root / f"case-{case.index}", ignore_errors=True)
    return Outcome(case.kind, line, time.monotonic() - began_at, problem, repeat=case.command)


def control(root: Path) -> Outcome:
    """A run with another seed must differ, or the comparison of states shows nothing."""
    began_at = time.monotonic()
    other = reference(root / "references", "pair", "run.seed=8", name="another-seed")
    found = checks.difference(*(checks.read_state(checks.last_states(path)[-1]) for path in _both(root, other)))
    problem = "" if found else "the states of two seeds are equal"
    return Outcome(CONTROL, CONTROL, time.monotonic() - began_at, problem, repeat="make hostile")


def _both(root: Path, other: Path) -> tuple[Path, Path]:
    return reference(root / "references", "pair"), other


def campaign(cases: Sequence[Case], root: Path, keep: bool) -> list[Outcome]:
    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(control, root), *(pool.submit(attempt, case, root, keep) for case in cases)]
        for future in as_completed(asked):
            outcomes.append(future.result())
            print(outcomes[-1], flush=True)
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    counts = Counter((outcome.kind, outcome.verdict) for outcome in outcomes)
    verdicts, names = ("ok", "FAILED", "skipped"), sorted({name for name, _ in counts})
    rows = [("kind", "ok", "failed", "skipped")]
    rows += [(name, *(str(counts[name, verdict]) for verdict in verdicts)) for name in names]
    return "\n".join(f"{name:<34}{ok:>6}{failed:>8}{skipped:>9}" for name, ok, failed, skipped in rows)


def summary(outcomes: Sequence[Outcome], seed: int) -> dict[str, object]:
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    skipped = sum(bool(outcome.skipped) for outcome in outcomes)
    survived = len(outcomes) - failed - skipped
    figures = {"cases": len(outcomes), "survived": survived, "failed": failed, "skipped": skipped, "seed": seed}
    return {"name": "hostile", **figures, "goal": GOAL, "met": bool(survived) and not failed}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="repeats a campaign; drawn anew without it")
    parser.add_argument("--case", type=int, default=None, help="this one alone")
    parser.add_argument("--count", type=int, default=COUNT, help="how many cases")
    parser.add_argument("--reduced", action="store_true", help="one of each family first")
    parser.add_argument("--only", default="", help="cases whose family or text holds this")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases that failed")
    parser.add_argument("--within", type=Path, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.within is not None:
        print(do(draw(asked.seed, asked.case), asked.within))
        return 0
    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    cases = [draw(seed, asked.case)] if asked.case is not None else None
    cases = cases or (reduced(seed, asked.count) if asked.reduced else [draw(seed, n) for n in range(asked.count)])
    cases = [case for case in cases if asked.only in f"{case.family} {case}"]
    print(f"seed {seed}: {len(cases)} cases (repeat with make hostile SEED={seed})", flush=True)
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        outcomes = campaign(cases, root, asked.keep)
    finally:
        if asked.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(f"\n{table(outcomes)}\n\nseed {seed}")
    told = summary(outcomes, seed)
    print(json.dumps(told))
    return 0 if told["met"] else 1


if __name__ == "__main__":
    sys.exit(main())

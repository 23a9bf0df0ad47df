"""How fast do samples arrive, how soon after a resume, and what does it cost in memory?

The same bytes are read by closeranks and by other loaders, each in a process of its own and all in turn, several times
over, at the same number of worker processes and the same quality of shuffling. Then closeranks alone resumes at 90% of
an epoch of 10 thousand to 100 million samples.

    python benchmarks/data.py                    all modes and peers (about 15 minutes)
    python benchmarks/data.py --kind tokens --workers 0 --shuffle full
    python benchmarks/data.py --quick            whether everything runs

Peers come with ``pip install -e '.[peers-data]'``; one that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_ours import OURS
from data_peers import PEERS
from data_resume import resume_figures
from data_work import Work
from results import Spread, conclude, say

MODULES = {
    "StatefulDataLoader": "torchdata",
    "grain": "grain",
    "litdata": "litdata",
    "streaming": "streaming",
    "WebDataset": "webdataset",
    "datasets": "datasets",
}
GOAL_RESUME_S = 0.05
NUM_SAMPLES = {"tokens": 100_000, "records": 10_000}


def main() -> None:
    args = _arguments()
    here = {name: kind for name, kind in {**OURS, **PEERS}.items() if find_spec(MODULES.get(name, "numpy"))}
    missing = sorted({**OURS, **PEERS}.keys() - here.keys())
    if missing:
        say(f"not installed, left out: {', '.join(missing)}")
    figures: dict[str, Any] = {"missing": missing, "modes": {}}
    with tempfile.TemporaryDirectory(prefix="closeranks-data-", dir=args.folder) as folder:
        for kind in args.kind:
            work = Work(kind, args.samples or NUM_SAMPLES[kind], 0, "none", args.batch, folder)
            prepared = prepare(here, work)
            for workers in args.workers:
                for shuffle in args.shuffle:
                    mode = replace(work, workers=workers, shuffle=shuffle)
                    name = f"{kind}, {workers} workers, {shuffle} shuffle"
                    figures["modes"][name] = race(name, prepared, mode, args)
        figures["resume"] = resume_figures(Path(folder), args.sizes) if args.sizes else {}
    goal = "samples a second at least those of the best peer in every mode; resume below 50 ms, whatever the size"
    conclude("data", figures, goal, is_met(figures))


def prepare(contenders: dict[str, Any], work: Work) -> dict[str, Any]:
    """Each writes the bytes in its own format, in its own process, and reads an epoch that must add up."""
    prepared: dict[str, Any] = {}
    sums: dict[str, Any] = {}
    for name, kind in contenders.items():
        with lane(name, work) as ask:
            if ask("prepare") is None:
                continue
            if kind().supports(work):
                sums[name] = ask("check")
            prepared[name] = kind
    wanted = sums["bare loop"]
    for name, found in sums.items():
        if found != wanted:
            say(f"{work.kind}: {name} read {found}, not {wanted}: left out")
            del prepared[name]
    return prepared


def race(name: str, contenders: dict[str, Any], work: Work, args: argparse.Namespace) -> dict[str, Any]:
    running = {key: kind for key, kind in contenders.items() if kind().supports(work)}
    rates: dict[str, list[float]] = {key: [] for key in running}
    memory: dict[str, float] = {}
    with ExitStack() as lanes:
        asks = {key: lanes.enter_context(lane(key, work)) for key in running}
        for number in range(args.rounds + 1):
            for key in turned(list(running), number):
                answer = asks[key]("go", seconds=args.seconds)
                if answer is None:
                    continue
                if number:  # the first round opens files and warms caches
                    rates[key].append(answer["rate"])
                memory[key] = answer["rss_mb"]
    spreads = {key: Spread.of(values) for key, values in rates.items() if values}
    ours = spreads["closeranks"]
    best = max((key for key in spreads if key not in OURS), key=lambda key: spreads[key].median)
    ratios = [mine / theirs for mine, theirs in zip(rates["closeranks"], rates[best], strict=True)]
    say(f"{name}: closeranks {ours.median:,.0f} samples/s")
    for key, spread in sorted(spreads.items(), key=lambda row: -row[1].median):
        say(f"    {key:20s} {spread.median:12,.0f}  ({spread.low:,.0f} to {spread.high:,.0f})  {memory[key]:.0f} MB")
    return {
        "samples_per_s": {key: spread.fields(0) for key, spread in spreads.items()},
        "anonymous_mb": {key: round(value) for key, value in memory.items()},
        "n/a": sorted(contenders.keys() - running.keys()),
        "best_peer": best,
        "over_best_peer": Spread.of(ratios).fields(2),
    }


def turned(names: Sequence[str], number: int) -> list[str]:
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


@contextmanager
def lane(name: str, work: Work) -> Iterator[Any]:
    """A contender's process; asking it returns its answer, or None where it broke down."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(here / "data_lane.py"), name, json.dumps(asdict(work))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(do: str, **values: Any) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            assert process.stderr is not None
            say(f"{name} broke down: {process.stderr.read()[-600:]}")
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        process.stdin.close()
        try:
            process.communicate(timeout=20)
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
            process.wait()


def is_met(figures: dict[str, Any]) -> bool:
    resumes = [row["first_batch_s"]["median"] for row in figures["resume"].values()]
    return (
        all(mode["over_best_peer"]["median"] >= 1.0 for mode in figures["modes"].values())
        and bool(resumes)
        and max(resumes) < GOAL_RESUME_S
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["tokens", "records"], action="append", help="default: both")
    parser.add_argument("--workers", type=int, action="append", help="processes that read; default: 0 and 2")
    parser.add_argument("--shuffle", choices=["full", "blocks", "none"], action="append", help="default: full, blocks")
    parser.add_argument("--samples", type=int, default=0, help="default: 100,000 of tokens, 10,000 records")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--sizes", type=int, action="append", help="samples of an epoch to resume in")
    parser.add_argument("--folder", default=None, help="where the data lies; default: the temporary folder")
    parser.add_argument("--quick", action="store_true", help="few samples and short turns")
    args = parser.parse_args()
    args.kind, args.workers = args.kind or ["tokens", "records"], args.workers or [0, 2]
    args.shuffle = args.shuffle or ["full", "blocks"]
    args.sizes = args.sizes or [10**4, 10**6, 10**8]
    if args.quick:
        args.samples, args.rounds, args.seconds, args.sizes = 2_000, 1, 0.2, [10**4, 10**5]
    return args


if __name__ == "__main__":
    main()

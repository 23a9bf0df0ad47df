"""Telemetry beside TraceML: what each costs, and what each says about runs that are slow for a known reason.

Two ranks train the same MLP on the same data in four lanes: a plain DDP loop; the same loop with TraceML, as its
quickstart shows (``traceml run``, ``init(mode="auto")`` and ``trace_step``, with all defaults); a script of closeranks
with telemetry on, which looks at resources as often as TraceML does; and one with telemetry off. They take turns of two
seconds, and every process of the others is frozen meanwhile. Ratios of step rates are taken within a round: the loop
with TraceML to the one without, and closeranks with telemetry to closeranks without. Then those causes of ``doctor.py``
that a plain loop can have are planted in both, and the diagnoses compared.

    python benchmarks/telemetry_peers.py                      about ten minutes
    python benchmarks/telemetry_peers.py --only overhead      or findings
    python benchmarks/telemetry_peers.py --cause slow-store garbage --only findings

TraceML comes with ``pip install -e '.[peers-telemetry]'``; without it the rest runs, and that is said.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from results import Spread, begin, conclude, say
from rounds import order
from telemetry_peers_findings import HEALTHY, LOOPS, Named, find
from telemetry_peers_lane import Lane, LaneTurn

from closeranks.core.errors import UserError

NUM_RANKS = 2
SAMPLE_S = 2.0
"""TraceML's default interval; ours is 5 s."""
ROWS = {"short": {"batch": 32, "num_steps": 200}, "long": {"batch": 1024, "num_steps": 10}}
"""Steps of some 10 and some 150 ms; a turn is about two seconds, as long as the interval of both."""
LANES: dict[str, dict[str, Any]] = {
    "bare": {},
    "traceml": {"traceml": True},
    "closeranks": {"closeranks": True, "telemetry": True, "sample_s": SAMPLE_S},
    "closeranks off": {"closeranks": True, "telemetry": False, "sample_s": 0.0},
}
PAIRS = {"traceml": ("traceml", "bare"), "closeranks": ("closeranks", "closeranks off")}
"""With telemetry, and without."""
CAUSES = tuple(loop.name for loop in LOOPS)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # frozen processes would outlive it
    is_here = find_spec("traceml_ai") is not None
    if not is_here:
        say("not installed, left out: TraceML (pip install -e '.[peers-telemetry]')")
    figures: dict[str, Any] = {"traceml": version("traceml-ai") if is_here else None, "overhead": {}, "findings": {}}
    with tempfile.TemporaryDirectory(prefix="closeranks-telemetry-peers-") as folder:
        if args.only != "findings":
            for name in args.row:
                figures["overhead"][name] = measure(name, args, Path(folder), with_peer=is_here)
        if args.only != "overhead":
            found = {cause: find(cause, args.seed, Path(folder), with_peer=is_here) for cause in args.cause}
            figures["findings"] = tell(found)
    goal = "telemetry slows steps down no more than TraceML (quartiles), and names at least as many planted causes"
    conclude("telemetry_peers", figures, goal, is_met(figures))


def measure(row: str, args: argparse.Namespace, folder: Path, *, with_peer: bool) -> dict[str, Any]:
    size = ROWS[row]
    block = args.block or size["num_steps"]
    common = {"traceml": False, "closeranks": False, "seed": args.seed, "batch": size["batch"]}
    common |= {"num_steps": (args.rounds + 1) * block + 1}  # one that is never taken: a run that ends does more
    turns: dict[str, list[LaneTurn]] = {}
    with ExitStack() as stack:
        lanes = {}
        for name, own in LANES.items():
            if with_peer or name != "traceml":
                lanes[name] = Lane(f"{row}-{name.replace(' ', '-')}", {**common, **own}, NUM_RANKS, folder)
                stack.callback(lanes[name].close)
                lanes[name].take(block)
        for number in range(args.rounds):
            for name in order(list(lanes), number):
                turns.setdefault(name, []).append(lanes[name].take(block))
    figures = compare(turns, block)
    _show(row, figures)
    return figures


def compare(turns: Mapping[str, Sequence[LaneTurn]], num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and of processor time of all processes for one; ratios with to without, by rounds."""
    found: dict[str, Any] = {"step_ms": {}, "cpu_ms": {}, "ratio": {}, "cpu_ratio": {}}
    for name, own in turns.items():
        found["step_ms"][name] = Spread.of(1000 * turn.seconds / num_steps for turn in own).fields(3)
        found["cpu_ms"][name] = Spread.of(1000 * turn.cpu_seconds / num_steps for turn in own).fields(3)
    for tool, (with_it, without) in PAIRS.items():
        if with_it in turns:
            rounds = list(zip(turns[with_it], turns[without], strict=True))
            found["ratio"][tool] = Spread.of(off.seconds / on.seconds for on, off in rounds).fields(4)
            found["cpu_ratio"][tool] = Spread.of(off.cpu_seconds / on.cpu_seconds for on, off in rounds).fields(4)
    return found


def tell(found: Mapping[str, Mapping[str, Named]]) -> dict[str, Any]:
    """What each tool said of each cause, and how many it named."""
    tools = sorted({tool for of_cause in found.values() for tool in of_cause})
    planted = {cause: of_cause for cause, of_cause in found.items() if cause != HEALTHY}
    counts: dict[str, Any] = {}
    for tool in tools:
        named = [of_cause[tool] for of_cause in planted.values()]
        counts[tool] = {
            "planted": len(named),
            "cause": sum(one.found == "cause" for one in named),
            "later": sum(one.found == "later" for one in named),
            "place": sum(one.found == "place" for one in named),
            "gain": sum(one.gain is not None for one in named),
        }
        words = (
            "{planted} causes: {cause} named first, {later} later, of {place} the place; a gain predicted for {gain}"
        )
        say(f"  {tool}, {words.format(**counts[tool])}")
    runs = {cause: {tool: asdict(named) for tool, named in of_cause.items()} for cause, of_cause in found.items()}
    return {"counts": counts, "runs": runs}


def is_met(figures: Mapping[str, Any]) -> bool:
    """Of whole runs with both tools only."""
    ratios = [row["ratio"] for row in figures["overhead"].values()]
    counts = figures["findings"].get("counts", {})
    if set(figures["overhead"]) != set(ROWS) or any(set(of) != set(PAIRS) for of in (*ratios, counts)):
        return False
    is_cheap = all(ratio["closeranks"]["high"] >= ratio["traceml"]["median"] for ratio in ratios)
    return is_cheap and counts["closeranks"]["cause"] >= counts["traceml"]["cause"]


def _show(row: str, figures: Mapping[str, Any]) -> None:
    for name, spread in figures["step_ms"].items():
        cpu = Spread(**figures["cpu_ms"][name]).words(2)
        say(f"  {row:<6} {name:<15} {Spread(**spread).words(2)} ms a step, {cpu} ms of processor time")
    for tool, spread in figures["ratio"].items():
        cpu = Spread(**figures["cpu_ratio"][tool]).words(4)
        say(f"  {row:<6} {tool}: {Spread(**spread).words(4)} of the step rate without; processor time, off / on: {cpu}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overhead", "findings"], help="default: both")
    parser.add_argument("--row", choices=list(ROWS), nargs="+", default=list(ROWS), help="default: both")
    parser.add_argument("--cause", nargs="+", default=[*CAUSES, HEALTHY], help="planted causes by name; default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: as many as two seconds have")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.cause) - {*CAUSES, HEALTHY}:
        raise UserError(f"nothing is called {', '.join(sorted(unknown))}", f"Known: {', '.join(CAUSES)}, {HEALTHY}.")
    return args


if __name__ == "__main__":
    begin(main)

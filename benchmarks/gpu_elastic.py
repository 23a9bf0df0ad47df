"""What does surviving faults cost a large model on one GPU, and how soon is it back?

A Llama of a billion parameters trains in bf16, compiled block by block, with everything that a recovery needs and with
``elastic.enabled = false``, in turns; the ratio of step rates is taken over whole stretches of steps, those with a copy
among them, within a round. Then its worker is killed by SIGKILL a few times: told is the time from the signal to the
next finished step, and where it went.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_elastic.py               about five minutes on one H200
    PYTHONPATH=src:benchmarks python benchmarks/gpu_elastic.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from elastic_runs import LaneFailed, Ours
from results import Spread, conclude, say

GOAL = 0.97
_SKIPPED = 15
"""Steps before anything is counted: compiling, pinning, and the device's clock."""
_PATIENCE_S = 300.0


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="closeranks-gpu-elastic-", dir=args.folder) as folder:
        steady = measure(Path(folder), args)
        struck = strike(Path(folder, "struck"), args)
    figures = {**steady, **struck}
    say(f"  {figures['words']}")
    goal = f"step rate with recovery on at least {GOAL} of that with it off; every kill is survived"
    met = args.device == "cuda" and not args.quick and steady["ratio"]["median"] >= GOAL
    conclude("gpu_elastic", figures, goal, met)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[bool, list[float]] = {True: [], False: []}
    told: list[Mapping[str, Any]] = []
    for number in range(args.rounds):
        for is_on in (True, False) if number % 2 else (False, True):
            overrides = [f"train.steps={args.steps + _SKIPPED}", f"elastic.enabled={str(is_on).lower()}"]
            with Ours(folder / f"{is_on}-{number}", 1, [*_settings(args), *overrides]) as lane:
                lane.wait_for("the end", lambda lane=lane: lane.num_done >= args.steps + _SKIPPED, _PATIENCE_S)
                if status := lane.end():
                    raise LaneFailed(f"it ended with status {status}")
                seconds = [float(step["seconds"]) for step in lane.events("step")][_SKIPPED:]
                told += lane.events("snapshots")[-1:]
            found[is_on].append(mean(seconds))
            say(f"    {'on ' if is_on else 'off'} {1000 * found[is_on][-1]:.1f} ms a step")
    ratio = Spread.of(off / on for on, off in zip(found[True], found[False], strict=True))
    return {
        "step_ms": round(1000 * median(found[False]), 1),
        "ratio": ratio.fields(4),
        "snapshot_every": sorted({int(one["every"]) for one in told}),
        "snapshot_gib": round(max((int(one["bytes"]) for one in told), default=0) / 2**30, 2),
        "snapshot_cost_ms": round(1000 * median([float(one["cost_s"]) for one in told] or [0.0]), 1),
        "words": f"{ratio.words(4)} of the rate without",
    }


def strike(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    overrides = [*_settings(args), "train.steps=1000000", "elastic.max_faults=100"]
    totals, parts = [], []
    with Ours(folder, 1, overrides) as lane:
        for number in range(args.strikes):
            first = lane.num_done
            lane.wait_for("steps", lambda first=first: lane.num_done >= first + args.steps, _PATIENCE_S)
            began_at = time.monotonic()
            os.kill(lane.workers()[0], signal.SIGKILL)
            closed_at = lane.wait_for(
                "the next good step", lambda number=number: len(_closed(lane)) > number, _PATIENCE_S
            )
            totals.append(closed_at - began_at)
            parts.append(_closed(lane)[number])
            say(f"    back in {totals[-1]:.2f} s, {parts[-1]['num_redone']} steps redone: {parts[-1]['parts']}")
    names = sorted({name for one in parts for name in one["parts"]})
    return {
        "back_s": Spread.of(totals).fields(2),
        "parts_s": {name: round(median(one["parts"].get(name, 0.0) for one in parts), 3) for name in names},
        "most_redone": max(one["num_redone"] for one in parts),
    }


def _closed(lane: Ours) -> Sequence[Mapping[str, Any]]:
    return lane.events("ranks_closed", "agent")


def _settings(args: argparse.Namespace) -> list[str]:
    size = ["model.preset=tiny"] if args.quick else ["model.preset=1b", "model.vocab_size=32000"]
    return [
        *size,
        f"data.seq_len={32 if args.quick else args.seq_len}",
        f"train.global_batch={args.batch}",
        f"train.micro_batch={args.batch}",
        "train.precision=float32" if args.device == "cpu" else "train.precision=bf16",
        f"train.compile={'true' if args.device == 'cuda' else 'false'}",
        "data.eval_fraction=0.0",
        f"run.device={args.device}",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of both lanes (default: 3)")
    parser.add_argument("--steps", type=int, default=150, help="steps of a turn that count (default: 150)")
    parser.add_argument("--strikes", type=int, default=3, help="kills (default: 3)")
    parser.add_argument("--batch", type=int, default=4, help="samples a step (default: 4)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sample (default: 2048)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--folder", type=Path, default=None, help="where runs go, for a while (default: /tmp)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

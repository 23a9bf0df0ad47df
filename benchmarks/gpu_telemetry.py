"""What does telemetry cost on a GPU? The same training with it on and off, in turns.

As ``benchmarks/telemetry.py``, for one rank on one GPU: two processes train the same Llama, one with everything
recorded and one without, and take turns of a few steps. The ratio of step rates is taken within each round; beside it
stands what the recorder takes of the host's time in a step. Two rows: the published model, whose steps keep the device
busy, and a short step of a model that is not compiled, for which the host launches kernels one by one: there, the
host's time is the step's.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_telemetry.py
    PYTHONPATH=src:benchmarks python benchmarks/gpu_telemetry.py --row short
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from results import Spread, begin, conclude, say

from closeranks.core.errors import UserError
from telemetry import DEFAULT_SAMPLE_S, GOAL, LANES, SAMPLE_S, Lane


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    preset: str
    batch: int
    seq_len: int
    compile: bool
    num_rounds: int
    num_steps: int
    """Of a turn."""
    num_processes: int
    """With telemetry, and as many without: where the host's time counts, processes alike differ by some percent."""


ROWS = {
    "long": Row("long", "1b_untied", 4, 4096, True, 8, 8, 1),
    "short": Row("short", "160m", 4, 256, False, 10, 30, 3),
}


def main() -> None:
    args = _arguments()
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here", "benchmarks/telemetry.py measures the same on CPUs.")
    figures = {name: measure(ROWS[name]) for name in (ROWS if args.row == "both" else (args.row,))}
    goal = (
        f"telemetry takes at most {GOAL:.0%} of a step of the host's time; the quartiles of the ratio reach {1 - GOAL}"
    )
    met = all(row["share_of_step"] <= GOAL and row["ratio"]["high"] >= 1 - GOAL for row in figures.values())
    conclude("gpu_telemetry", figures, goal, met)


def measure(row: Row) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="closeranks-telemetry-") as folder, ExitStack() as stack:
        lanes = {name: [_open(name, row, Path(folder) / str(n)) for n in range(row.num_processes)] for name in LANES}
        for lane in chain(*lanes.values()):
            stack.callback(lane.close)
            lane.ask("steps", row.num_steps)
        seconds: dict[str, list[float]] = {name: [] for name in LANES}
        for number in range(row.num_rounds):
            for name in LANES if number % 2 else LANES[::-1]:
                answers = [lane.ask("steps", row.num_steps)[0] for lane in lanes[name]]
                seconds[name].append(fmean(answer["seconds"] for answer in answers) / row.num_steps)
        (spans,) = lanes["on"][0].ask("spans", row.num_steps)
    host_us = spans["num_switches"] * spans["switch_us"] + spans["record_us"]
    ratio = Spread.of(off / on for on, off in zip(seconds["on"], seconds["off"], strict=True))
    step_ms = Spread.of(1000 * one for one in seconds["off"])
    say(f"{row.name} step: {step_ms.words(2)} ms without telemetry")
    say(f"  step rate, on / off: {ratio.words(4)}")
    say(f"  of the host's time in a step: {host_us:.0f} us, {host_us / 1000 / step_ms.median:.3%} of the step:")
    say(f"    {spans['num_switches']:.0f} times switch, {spans['switch_us']:.2f} us each")
    say(f"    {spans['record_us']:.1f} us for the record of the step")
    say(f"  beside it: a look at resources every {DEFAULT_SAMPLE_S:g} s takes {spans['look_ms']:.2f} ms of a thread")
    rounded = {name: round(value, 5) for name, value in spans.items()}
    share = round(host_us / 1000 / step_ms.median, 5)
    return {"step_ms": step_ms.fields(3), "ratio": ratio.fields(5), "share_of_step": share, **rounded}


def _open(name: str, row: Row, folder: Path) -> Lane:
    """With telemetry on or off."""
    arguments = {
        "preset": row.preset,
        "batch": row.batch,
        "seq_len": row.seq_len,
        "compile": row.compile,
        "num_steps": (2 * row.num_rounds + 4) * row.num_steps + 1000,
        "folder": str(folder / name),
        "phases": name == "on",
        "sample_s": SAMPLE_S[name],
    }
    return Lane("gpu_telemetry_lane.py", arguments, num_ranks=1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=[*ROWS, "both"], default="both")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

"""What does telemetry cost? The same training with it on and off, in turns.

Two ranks train a Llama with everything recorded (phases, bytes sent, memory, and resources five times as often as by
default); two other ranks train the same with ``telemetry.phases = false`` and ``telemetry.sample_s = 0``. Only one pair
computes at a time: they take turns of a few steps, and the ratio of step rates is taken within each round. Beside the
ratio, whose spread is that of the machine, stand the spans: the processor time that the recorder itself takes of a
step, as the number of its calls times the cost of one, and by a clock around it; and the instructions of the same calls
if valgrind is installed. Two rows: steps of about 10 and 200 ms.

    python benchmarks/telemetry.py                    both rows, about seven minutes on a quiet machine
    python benchmarks/telemetry.py --row short        only the short step
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

from results import Spread, begin, conclude, say
from telemetry_instructions import count_instructions
from telemetry_instructions import in_step as instructions_in_step

NUM_RANKS = 2
GOAL = 0.01
LANES = ("on", "off")
SAMPLE_S = {"on": 1.0, "off": 0.0}
DEFAULT_SAMPLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    target_ms: float
    seq_len: int
    num_layers: int
    num_rounds: int
    num_steps: int


ROWS = {"short": Row("short", 10.0, 32, 1, 60, 40), "long": Row("long", 200.0, 128, 4, 30, 4)}


class Lane:
    """Ranks that run ``script``, a pair unless told otherwise; they compute only in their turns."""

    def __init__(self, script: str, arguments: dict[str, Any], num_ranks: int = NUM_RANKS) -> None:
        self._script, self._num_ranks, self._stack = script, num_ranks, ExitStack()
        port = _free_port()
        self._ranks = [self._start(rank, port, arguments) for rank in range(num_ranks)]

    def _start(self, rank: int, port: int, arguments: dict[str, Any]) -> subprocess.Popen[str]:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._num_ranks, "LOCAL_WORLD_SIZE": self._num_ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in (world | address).items()}
        command = [sys.executable, str(Path(__file__).with_name(self._script)), json.dumps(arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def ask(self, what: str, number: int) -> list[dict[str, Any]]:
        """What each rank answers."""
        for process in self._ranks:
            assert process.stdin is not None
            print(what, number, file=process.stdin, flush=True)
        return [self._answer(process) for process in self._ranks]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise RuntimeError(f"a rank ended with status {process.wait()}")

    def close(self) -> None:
        self._stack.close()


def open_lane(name: str, row: Row, batch: int, folder: Path) -> Lane:
    """With telemetry on or off."""
    arguments = {
        "batch": batch,
        "seq_len": row.seq_len,
        "num_layers": row.num_layers,
        "num_steps": (2 * row.num_rounds + 4) * row.num_steps + 1000,
        "folder": str(folder / f"{name}-{batch}"),
        "phases": name == "on",
        "sample_s": SAMPLE_S[name],
    }
    return Lane("telemetry_lane.py", arguments)


def main() -> None:
    args = _arguments()
    names = ROWS if args.row == "both" else (args.row,)
    figures = {name: measure(_row(ROWS[name], args), args.batch) for name in names}
    add_instructions(figures)
    goal = f"telemetry's own time at most {GOAL:.0%} of a step, by spans; the quartiles of the ratio reach {1 - GOAL}"
    conclude("telemetry", figures, goal, all(is_met(row) for row in figures.values()))


def is_met(row: dict[str, Any]) -> bool:
    """The spread of the ratio is the machine's: its quartiles must allow the goal, the spans must meet it."""
    return bool(row["share_of_step"] <= GOAL and row["ratio"]["high"] >= 1 - GOAL)


def measure(row: Row, batch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="closeranks-telemetry-") as folder, ExitStack() as stack:
        batch = batch or calibrate(row, Path(folder))
        lanes = {name: open_lane(name, row, batch, Path(folder)) for name in LANES}
        for lane in lanes.values():
            stack.callback(lane.close)
            lane.ask("steps", row.num_steps)
        rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in LANES}
        for number in range(row.num_rounds):
            for name in LANES if number % 2 else LANES[::-1]:
                rounds[name].append(lanes[name].ask("steps", row.num_steps))
        spans = lanes["on"].ask("spans", row.num_steps)
    figures = {"batch_per_rank": batch, **compare(rounds, row.num_steps), **in_step(spans)}
    figures["share_of_step"] = round(figures["telemetry_us"] / 1000 / figures["step_ms"]["median"], 5)
    _show(row, figures)
    return figures


def calibrate(row: Row, folder: Path) -> int:
    """The batch whose step takes the target, from the times of two small ones."""
    times = {}
    for batch in (1, 4):
        lane = open_lane("off", row, batch, folder)
        lane.ask("steps", row.num_steps)
        times[batch] = min(max(one["seconds"] for one in lane.ask("steps", row.num_steps)) for _ in range(3))
        lane.close()
    base_s, more_s = (seconds / row.num_steps for seconds in times.values())
    return max(1, ceil(1 + (row.target_ms / 1000 - base_s) / max((more_s - base_s) / 3, 1e-5)))


def compare(rounds: dict[str, list[list[dict[str, Any]]]], num_steps: int) -> dict[str, Any]:
    """The rate with telemetry, relative to that without: above one it was faster, by chance."""
    wall = {name: [max(one["seconds"] for one in turn) for turn in own] for name, own in rounds.items()}
    cpu = {name: [mean(one["cpu_seconds"] for one in turn) for turn in own] for name, own in rounds.items()}
    return {
        "step_ms": Spread.of(1000 * seconds / num_steps for seconds in wall["off"]).fields(3),
        "ratio": Spread.of(off / on for on, off in zip(wall["on"], wall["off"], strict=True)).fields(4),
        "cpu_ratio": Spread.of(off / on for on, off in zip(cpu["on"], cpu["off"], strict=True)).fields(4),
    }


def in_step(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the slower rank: calls times their costs, the recorder's own spans, and the share of the sampling thread."""
    by_rank = []
    for one in spans:
        switches_us = one["num_switches"] * one["switch_us"]
        counts_us = one["num_counts"] * one["count_us"]
        by_rank.append({**one, "telemetry_us": switches_us + counts_us + one["record_us"]})
    slower = max(by_rank, key=lambda one: one["telemetry_us"])
    slower["look_share"] = slower["look_ms"] / 1000 / DEFAULT_SAMPLE_S
    return {name: round(value, 5) for name, value in slower.items()}


def add_instructions(figures: dict[str, dict[str, Any]]) -> None:
    counts = count_instructions()
    for name, row in figures.items():
        row["instructions"] = counts
        if counts is not None:
            in_step = instructions_in_step(counts, row["num_switches"], row["num_counts"])
            row["instructions"] = {**counts, "in_step": round(in_step)}
            each = ", ".join(f"{part} {executed:,}" for part, executed in counts.items())
            say(f"{name} step: {in_step:,.0f} instructions of telemetry ({each})")
    if counts is None:
        say("instructions are not counted: valgrind is not installed")


def _show(row: Row, figures: dict[str, Any]) -> None:
    say(f"{row.name} step: {figures['step_ms']['median']:.2f} ms with {figures['batch_per_rank']} samples a rank")
    for name, words in (("ratio", "step rate, on / off"), ("cpu_ratio", "processor time, off / on")):
        found = figures[name]
        say(f"  {words:<26} {found['median']:.4f}  ({found['low']:.4f} to {found['high']:.4f})")
    say(f"  in the step: {figures['telemetry_us']:.1f} us, {figures['share_of_step']:.3%}:")
    for what in ("switch", "count"):
        num = figures["num_switches" if what == "switch" else "num_counts"]
        say(f"    {num:.0f} times {what}, {figures[f'{what}_us']:.2f} us each")
    say(f"    {figures['record_us']:.1f} us for the record of the step")
    say(f"  beside it: a look at resources every {DEFAULT_SAMPLE_S:g} s takes {figures['look_ms']:.2f} ms of a thread")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _row(row: Row, args: argparse.Namespace) -> Row:
    rounds, block = args.rounds or row.num_rounds, args.block or row.num_steps
    return Row(row.name, row.target_ms, row.seq_len, row.num_layers, rounds, block)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=[*ROWS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=0, help="rounds a row; default: 60 short, 30 long")
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: 40 short, 4 long")
    parser.add_argument("--batch", type=int, default=0, help="samples a rank; default: chosen by measuring")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

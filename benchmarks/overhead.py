"""What does closeranks cost beside a hand-written DDP loop, and beside Accelerate and Lightning?

Two processes on this machine train the same Llama on the same batches from the same weights, with the same clipping,
schedule, AdamW and logging (every step one JSON line with the loss of all ranks, gradient norm, rate and speed). All
contenders live in these processes and take turns of a few steps, in rotating order; the ratio of step rates is taken
within each round. The hand-written loop comes with DDP's defaults and tuned, and the better one is the baseline. Their
losses must agree, else the comparison is void. Two rows: a step of 150 ms or more, and one of about 10 ms.

    python benchmarks/overhead.py                     both rows, about three minutes on a quiet machine
    python benchmarks/overhead.py --row short         only the short step
    pip install -e '.[peers]'                         brings Accelerate and Lightning
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from results import Spread, conclude, say

NUM_RANKS = 2
TOLERANCE = 1e-4
NUM_COMPARED = 10
GOAL = 0.98
RIVALS = ("accelerate", "lightning")
BASELINES = ("ddp", "ddp_tuned")


@dataclass(frozen=True, slots=True)
class Row:
    """One size of step: how long it should take, and how often it is measured."""

    name: str
    target_ms: float
    seq_len: int
    num_rounds: int
    num_steps: int
    num_layers: int | None = None


ROWS = {
    "long": Row("long", 150.0, 128, 18, 4),
    "short": Row("short", 10.0, 32, 30, 20, num_layers=1),
}


def main() -> None:
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = {}
    for name in ROWS if args.row == "both" else (args.row,):
        figures[name] = measure(_row(ROWS[name], args), args)
    goal = (
        f"a step of {ROWS['long'].target_ms:g} ms or more: step rate at least {GOAL} of the hand-written loop's "
        f"and no less than the better of Accelerate's and Lightning's; equal losses"
    )
    conclude("overhead", figures, goal, judge(figures))


def judge(figures: dict[str, Any]) -> bool:
    """Whether the long row was measured, is long, and meets the goal; the short one is published as it is."""
    if "long" not in figures or not all(row["losses_agree"] for row in figures.values()):
        return False
    ratios = {name: ratio["median"] for name, ratio in figures["long"]["ratio"].items()}
    rival = max((ratios[name] for name in RIVALS if name in ratios), default=0.0)
    is_long = figures["long"]["step_ms"]["median"] >= ROWS["long"].target_ms
    return is_long and ratios["closeranks"] >= max(GOAL, rival)


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    from peers import PEERS, installed_peers
    from rounds import Plan, run_rank
    from workload import Workload

    from closeranks.testing.world import run_world

    peers = tuple(name for name in installed_peers() if name not in args.without)
    missing = sorted(set(PEERS) - set(peers))
    note = f" (without {', '.join(missing)}: not installed, or left out)" if missing else ""
    say(f"{row.name} step: {row.num_rounds} rounds, turns of {row.num_steps} steps{note}")
    with tempfile.TemporaryDirectory(prefix="closeranks-overhead-") as folder, Agent(f"{folder}/agent") as agent:
        # One turn to warm up, and one step that is never taken: closeranks would evaluate and save after its last.
        num_steps = (row.num_rounds + 1) * row.num_steps + 1
        workload = Workload(args.preset, row.seq_len, args.batch, NUM_RANKS, num_steps, Path(folder), row.num_layers)
        plan = Plan(workload, row.target_ms, row.num_rounds, row.num_steps, peers, agent.path)
        timings = run_world(run_rank, NUM_RANKS, plan, timeout_s=args.timeout_s)
    slower = _together([one.seconds for one in timings], max)
    figures = {"batch_per_rank": timings[0].batch, "seq_len": row.seq_len, "without": missing}
    figures |= compare(slower, row.num_steps) | compare_losses(timings[0].losses)
    spent = _together([one.cpu_seconds for one in timings], mean)
    figures["cpu_ms"] = {name: round(1000 * median(turns) / row.num_steps, 3) for name, turns in spent.items()}
    _show(figures)
    return figures


def _together(
    ranks: Sequence[Mapping[str, Sequence[float]]], combine: Callable[[Sequence[float]], float]
) -> dict[str, list[float]]:
    """One value for each turn from those of all ranks."""
    return {name: [combine(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def compare(seconds: dict[str, list[float]], num_steps: int) -> dict[str, Any]:
    """Step rates relative to the better hand-written loop, round by round."""
    spreads = {name: Spread.of(seconds[name]) for name in BASELINES}
    baseline = min(BASELINES, key=lambda name: spreads[name].median)
    ratios = {
        name: Spread.of(base / own for base, own in zip(seconds[baseline], turns, strict=True))
        for name, turns in seconds.items()
    }
    return {
        "baseline": baseline,
        "step_ms": Spread.of(1000 * turn / num_steps for turn in seconds[baseline]).fields(2),
        "ratio": {name: ratio.fields(4) for name, ratio in ratios.items()},
    }


def compare_losses(losses: dict[str, list[float]]) -> dict[str, Any]:
    """How far the contenders' losses lie apart over the first steps."""
    first = [values[:NUM_COMPARED] for values in losses.values()]
    gaps = [max(step) - min(step) for step in zip(*first, strict=False)]
    agree = bool(gaps) and all(gap <= TOLERANCE for gap in gaps)  # a loss that is not a number agrees with none
    return {"loss_gap": max(gaps, default=None), "losses_compared": len(gaps), "losses_agree": agree}


def _show(figures: dict[str, Any]) -> None:
    step = figures["step_ms"]
    say(f"  {figures['batch_per_rank']} samples a rank, {step['median']:.1f} ms a step by {figures['baseline']}")
    num, gap = figures["losses_compared"], figures["loss_gap"] or 0
    agree = f"agree (at most {gap:.1e} apart)" if figures["losses_agree"] else "DO NOT AGREE: the comparison is void"
    say(f"  losses of the first {num} steps {agree}")
    for name, ratio in sorted(figures["ratio"].items(), key=lambda item: -item[1]["median"]):
        cpu = f"{figures['cpu_ms'][name]:.2f} ms of processor time a step"
        say(f"  {name:<12} {ratio['median']:.4f}  ({ratio['low']:.4f} to {ratio['high']:.4f})  {cpu}")


class Agent:
    """Stands in for the agent of ``closeranks train``: greets each rank and hears what it tells."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()

    def __enter__(self) -> Agent:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        from closeranks.agent.workers.wire import encode_message

        for _ in range(NUM_RANKS):
            endpoint, _address = self._listener.accept()
            hello = {"type": "hello", "world": {"hosts": []}, "entry": "", "payload": {}, "boxes": [], "host": ""}
            endpoint.sendall(encode_message(hello))
            threading.Thread(target=self._receive, args=(endpoint,), daemon=True).start()

    @staticmethod
    def _receive(endpoint: socket.socket) -> None:
        from closeranks.agent.workers.wire import LineBuffer

        lines = LineBuffer()
        while data := endpoint.recv(1 << 18):
            lines.feed(data)


def _row(row: Row, args: argparse.Namespace) -> Row:
    return Row(
        row.name,
        args.target_ms or row.target_ms,
        args.seq_len or row.seq_len,
        args.rounds or row.num_rounds,
        args.block or row.num_steps,
        row.num_layers,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=[*ROWS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=0, help="rounds a row; default: 18 long, 30 short")
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: 4 long, 20 short")
    parser.add_argument("--target-ms", type=float, default=0.0, help="length of a step that the batch is chosen for")
    parser.add_argument("--batch", type=int, default=0, help="samples a rank; default: chosen by measuring")
    parser.add_argument("--preset", default="small", help="the Llama preset (default: small, 1.4 million parameters)")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens of a sample; default: 128 long, 32 short")
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out: accelerate lightning fabric")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Is the communication that telemetry calls exposed what training waits for? The same job with overlap on and off.

Two ranks train a Llama with ``sync.overlap = true``, two others the same with ``false``; they take turns of a few
steps. Gradients travel on a link that is slow and takes no processor time (``exposed_lane.py``), whose own clock says
how long they were under way. Two comparisons, round by round:

    off             what telemetry records as exposed, and how long the link was busy: all of it is waited for
    off minus on    by how much steps are shorter with overlap, and by how much less is recorded as exposed

    python benchmarks/exposed.py                      about three minutes on a quiet machine
    python benchmarks/exposed.py --rate-mb 20         a slower link
    python benchmarks/exposed.py --rounds 2 --block 3 whether everything runs
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from results import Spread, begin, conclude, say

from telemetry import Lane

LANES = ("off", "on")
BUSY_TOLERANCE = 0.03
SAVED_TOLERANCE = 0.10
FIGURES = ("step_s", "exposed_s", "busy_s")
Turn = list[dict[str, list[float]]]
"""What the ranks answered: each figure of each step."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="closeranks-exposed-") as folder:
        figures = measure(args, Path(folder))
    goal = f"with overlap off, exposed communication is the link's busy time within {BUSY_TOLERANCE:.0%}; overlap "
    goal += (
        f"makes steps shorter by as much as exposed communication falls, within {SAVED_TOLERANCE:.0%} of the busy time"
    )
    conclude("exposed", figures, goal, is_met(figures))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        lanes = {name: _open_lane(name, args, folder) for name in LANES}
        for lane in lanes.values():
            stack.callback(lane.close)
            lane.ask("steps", args.block)
        rounds: dict[str, list[Turn]] = {name: [] for name in LANES}
        for number in range(args.rounds):
            for name in LANES if number % 2 else LANES[::-1]:
                rounds[name].append(lanes[name].ask("steps", args.block))  # type: ignore[arg-type]
    figures = {"rate_mb": args.rate_mb, **compare(rounds)}
    _show(figures)
    return figures


def compare(rounds: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Means over the ranks and steps of each turn; ratios and differences are taken within a round."""
    means = {name: [_means(turn) for turn in turns] for name, turns in rounds.items()}
    figures: dict[str, Any] = {}
    for figure in FIGURES:
        spreads = {name: Spread.of(1000 * one[figure] for one in turns) for name, turns in means.items()}
        figures[f"{figure[:-2]}_ms"] = {name: spread.fields(2) for name, spread in spreads.items()}
    pairs = list(zip(means["off"], means["on"], strict=True))
    saved = [off["step_s"] - on["step_s"] for off, on in pairs]
    hidden = [off["exposed_s"] - on["exposed_s"] for off, on in pairs]
    busy = [off["busy_s"] for off, _ in pairs]
    return figures | {
        "exposed_to_busy": Spread.of(off["exposed_s"] / off["busy_s"] for off, _ in pairs).fields(4),
        "saved_ms": Spread.of(1000 * one for one in saved).fields(2),
        "hidden_ms": Spread.of(1000 * one for one in hidden).fields(2),
        "gap_to_busy": Spread.of((s - h) / b for s, h, b in zip(saved, hidden, busy, strict=True)).fields(4),
    }


def is_met(figures: Mapping[str, Any]) -> bool:
    return bool(
        abs(figures["exposed_to_busy"]["median"] - 1) <= BUSY_TOLERANCE
        and abs(figures["gap_to_busy"]["median"]) <= SAVED_TOLERANCE
    )


def _means(turn: Turn) -> dict[str, float]:
    return {figure: mean(value for rank in turn for value in rank[figure]) for figure in FIGURES}


def _open_lane(name: str, args: argparse.Namespace, folder: Path) -> Lane:
    arguments = {
        "batch": args.batch,
        "seq_len": 64,
        "num_layers": 4,
        "num_steps": (args.rounds + 2) * args.block + 10,
        "folder": str(folder / name),
        "overlap": name == "on",
        "bytes_per_s": 1e6 * args.rate_mb,
    }
    return Lane("exposed_lane.py", arguments)


def _show(figures: Mapping[str, Any]) -> None:
    for name in LANES:
        words = {one: Spread(**figures[f"{one}_ms"][name]).words(1) for one in ("step", "exposed", "busy")}
        say(f"overlap {name:<3}  {words['step']} ms a step, exposed {words['exposed']}, link busy {words['busy']}")
    say(f"off: exposed / busy {Spread(**figures['exposed_to_busy']).words(3)}")
    saved, hidden, gap = (Spread(**figures[name]) for name in ("saved_ms", "hidden_ms", "gap_to_busy"))
    say(f"steps shorter by {saved.words(1)} ms, {hidden.words(1)} ms less exposed; difference {gap.words(3)} of busy")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn; the last two of each are not compared")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank")
    parser.add_argument("--rate-mb", type=float, default=60.0, help="of the link, in MB of gradients a second")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

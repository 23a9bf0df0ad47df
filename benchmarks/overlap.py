"""How much of its communication does closeranks hide behind computation, on a link that is too slow to be ignored?

Two network namespaces play two hosts with a slowed link, one rank each. The same Llama is trained with and without
overlap: gradients that travel during backward (``sync.overlap``, zero 0 and 1), weights gathered ahead of their use
(``sync.prefetch``, zero 3). A loop that trains the same without any communication is the floor. All take turns of a few
steps in the same two processes; what is compared is always within a round. Needs root.

    python benchmarks/overlap.py                         about five minutes on a quiet machine
    python benchmarks/overlap.py --rate-mbit 250         a slower link
    python benchmarks/overlap.py --quick                 tiny sizes: whether everything runs, no figures
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import Spread, conclude, say

from hosts import require_hosts, run_ranks

TOLERANCE = 1e-4
NUM_COMPARED = 10
FLOOR = "alone"
PAIRS = {
    "zero0": ({"data": 2}, {"overlap": True}, {"overlap": False}),
    "zero1": ({"data": 2, "zero": 1}, {"overlap": True}, {"overlap": False}),
    "zero3": ({"data": 2, "zero": 3}, {"prefetch": 1}, {"overlap": False, "prefetch": 0}),
}
"""Layout, and the table ``[sync]`` with and without overlap."""
FULL = {
    "model": {"preset": "small", "dim": 320, "ffn_dim": 896, "num_layers": 8},
    "bucket_mib": 4.0,
    "seq_len": 128,
    "batch": 4,
}
"""9.4 million parameters: 38 MB of gradients take 0.6 s at 500 Mbit/s, about as long as backward on one core."""
QUICK = {"model": {"preset": "tiny", "num_layers": 2}, "bucket_mib": 0.25, "seq_len": 16, "batch": 1}


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    quiet = contextlib.redirect_stdout(io.StringIO()) if args.json_only else contextlib.nullcontext()
    require_hosts()
    with quiet, tempfile.TemporaryDirectory(prefix="closeranks-overlap-") as folder:
        figures = measure(args, Path(folder))
    goal = "in every pair steps with overlap are faster than without; equal losses"
    conclude("overlap", figures, goal, not args.quick and judge(figures))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = QUICK if args.quick else FULL
    plan = {**size, "rounds": args.repeats, "block": args.block, "variants": variants(size)}
    ranks = run_ranks("overlap_rank.py", plan, folder, rate_mbit=args.rate_mbit, timeout_s=args.timeout_s)
    figures = {"rate_mbit": args.rate_mbit, "left_out": ranks[0]["left_out"], **size}
    figures |= compare(slower([rank["seconds"] for rank in ranks]), args.block) | compare_losses(ranks[0]["losses"])
    _show(figures)
    return figures


def slower(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Each turn as its slower rank saw it."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def variants(size: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name to the tables that a job of it adds."""
    buckets = {"bucket_mib": size["bucket_mib"], "first_bucket_mib": min(1.0, size["bucket_mib"])}
    return {
        f"{pair} {word}": {"layout": layout, "sync": {**buckets, **sync}}
        for pair, (layout, *both) in PAIRS.items()
        for word, sync in zip(("with", "without"), both, strict=True)
    }


def compare(seconds: Mapping[str, Sequence[float]], num_steps: int) -> dict[str, Any]:
    """Step times of each pair, the gain, and the share of communication that is hidden, round by round.

    Communication is what the step without overlap takes beyond the floor.
    """
    floor = seconds[FLOOR]
    figures: dict[str, Any] = {"floor_ms": _ms(floor, num_steps), "pairs": {}}
    for pair in PAIRS:
        if f"{pair} with" not in seconds or f"{pair} without" not in seconds:
            continue
        fast, slow = seconds[f"{pair} with"], seconds[f"{pair} without"]
        turns = list(zip(fast, slow, floor, strict=True))
        figures["pairs"][pair] = {
            "with_ms": _ms(fast, num_steps),
            "without_ms": _ms(slow, num_steps),
            "speedup": Spread.of(without / having for having, without, _ in turns).fields(4),
            "communication_ms": _ms([without - base for _, without, base in turns], num_steps),
            "hidden": Spread.of(hidden_share(*turn) for turn in turns).fields(3),
        }
    return figures


def hidden_share(fast: float, slow: float, floor: float) -> float:
    """1: nothing is seen of the communication; 0: all of it; a link too fast to be measured hides nothing."""
    return (slow - fast) / (slow - floor) if slow > floor else 0.0


def _ms(seconds: Sequence[float], num_steps: int) -> dict[str, Any]:
    return Spread.of(1000 * turn / num_steps for turn in seconds).fields(1)


def compare_losses(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Every variant trains the same; the floor's ranks train apart and are not among them."""
    first = [values[:NUM_COMPARED] for values in losses.values()]
    gaps = [(max(step) - min(step)) / min(step) for step in zip(*first, strict=False)]
    agree = len(first) > 1 and bool(gaps) and all(gap <= TOLERANCE for gap in gaps)
    return {"loss_gap": max(gaps, default=None), "losses_agree": agree}


def judge(figures: Mapping[str, Any]) -> bool:
    pairs = figures["pairs"]
    return bool(figures["losses_agree"] and set(pairs) == set(PAIRS)) and all(
        pair["speedup"]["median"] > 1 for pair in pairs.values()
    )


def _show(figures: Mapping[str, Any]) -> None:
    for name, why in figures["left_out"].items():
        say(f"  {name}: left out ({why})")
    agree = "agree" if figures["losses_agree"] else "DO NOT AGREE: the comparison is void"
    say(f"  without communication {Spread(**figures['floor_ms']).words(1)} ms a step; losses {agree}")
    for name, pair in figures["pairs"].items():
        times = f"{Spread(**pair['with_ms']).words(1)} ms with overlap, {Spread(**pair['without_ms']).words(1)} without"
        hidden = f"{pair['hidden']['median']:.0%} of {pair['communication_ms']['median']:.0f} ms communication hidden"
        say(f"  {name}: {times}; {hidden}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=500.0, help="of the link, in each direction")
    parser.add_argument("--repeats", type=int, default=0, help="rounds; default: 8, or 1 with --quick")
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: 3, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether everything runs")
    parser.add_argument("--json-only", action="store_true", help="print the closing line alone")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.quick else 8)
    args.block = args.block or (2 if args.quick else 3)
    return args


if __name__ == "__main__":
    main()

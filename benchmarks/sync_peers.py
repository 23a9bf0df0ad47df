"""What do compressed gradients cost and save beside torch's own communication hooks for DDP?

Two network namespaces play two hosts with a slowed link, one rank each. The same Llama is trained from the same weights
on the same batches with fused AdamW, by torch's DDP (plain, ``fp16_compress_hook``, ``powerSGD_hook`` of rank 4 with
error feedback and warm start) and by closeranks (none, fp16, powersgd of rank 4), the latter as whole sessions of
``[sync.compress]``, with their loader, recorder and vote; fp16 also without error feedback, as torch's hook has none.
All take turns of a few steps in the same two processes, and ratios of step rates are taken within a round. torch's
PowerSGD hangs on Gloo with several buckets under way: it runs both with a hook that waits and in one bucket, and the
faster counts. Bytes are those that a host sent through its interface. Needs root.

    python benchmarks/sync_peers.py                       100 Mbit/s and 1 Gbit/s, about six minutes
    python benchmarks/sync_peers.py --rate-mbit 250       another link
    python benchmarks/sync_peers.py --quick               tiny sizes: whether everything runs, no figures
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
from statistics import mean, median
from typing import Any

from results import Spread, conclude, say

from hosts import require_hosts, run_ranks

GOAL = 0.97
RANK = 4
WARMUP = 2
"""Steps before compression sets in: the least that torch's PowerSGD allows."""
OURS = {"none": "closeranks none", "fp16": "closeranks fp16", "powersgd": "closeranks powersgd"}
FORGETFUL = "closeranks fp16, no feedback"
"""Published beside: torch's fp16 hook forgets what rounding lost, ours by default does not."""
RIVALS = {
    "none": {"ddp none": "none"},
    "fp16": {"ddp fp16": "fp16"},
    "powersgd": {"ddp powersgd": "powersgd", "ddp powersgd, one bucket": "powersgd, one bucket"},
}
"""Kind to torch's lanes of that kind, and the hook of each."""
TOLERANCES = {"none": 1e-4, "fp16": 2e-3, "powersgd": 0.1}
"""Of the loss, relative: the two of a kind sum alike, round alike, or leave out alike."""
NUM_COMPARED = 10
FULL = {
    "model": {"preset": "small", "dim": 256, "ffn_dim": 704, "num_layers": 8},
    "bucket_mib": 4.0,
    "seq_len": 64,
    "batch": 4,
}
"""6.5 million parameters: 26 MB of gradients take 2.1 s at 100 Mbit/s, 0.2 s at 1 Gbit/s."""
QUICK = {"model": {"preset": "tiny", "num_layers": 2}, "bucket_mib": 0.25, "seq_len": 16, "batch": 1}
ROUNDS = {100.0: (8, 2), 1000.0: (12, 4)}
"""Width of the link to rounds and steps of a turn."""


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    require_hosts()
    quiet = contextlib.redirect_stdout(io.StringIO()) if args.json_only else contextlib.nullcontext()
    with quiet:
        figures = {f"{rate:g} Mbit/s": measure(rate, args) for rate in args.rate_mbit}
    goal = f"with every kind and on every link: step rate at least {GOAL} of torch's own hook's; like losses"
    conclude("sync_peers", figures, goal, not args.quick and judge(figures))


def measure(rate_mbit: float, args: argparse.Namespace) -> dict[str, Any]:
    size = QUICK if args.quick else FULL
    usual = (1, 3) if args.quick else ROUNDS.get(rate_mbit, (8, 3))
    num_rounds, num_steps = args.repeats or usual[0], args.block or usual[1]
    with tempfile.TemporaryDirectory(prefix="closeranks-sync-peers-") as folder:
        plan = {**size, "rounds": num_rounds, "block": num_steps, "kinds": args.kind}
        script, where = "sync_peers_rank.py", Path(folder)
        told = run_ranks(script, plan, where, rate_mbit=rate_mbit, timeout_s=args.timeout_s)
    figures = compare([rank["seconds"] for rank in told], num_steps) | compare_losses(told[0]["losses"])
    for key, scale, digits in (("cpu_seconds", 1000, 1), ("sent", 1, 0)):
        turns = {name: [mean(turn) for turn in _by_turn(told, key, name)] for name in told[0][key]}
        figures[_PER_STEP[key]] = {n: round(scale * median(of) / num_steps, digits) for n, of in turns.items()}
    _show(figures)
    return figures


_PER_STEP = {"cpu_seconds": "cpu_ms", "sent": "bytes_per_step"}


def _by_turn(told: Sequence[Mapping[str, Any]], key: str, name: str) -> list[tuple[float, ...]]:
    return list(zip(*(rank[key][name] for rank in told), strict=True))


def compare(ranks: Sequence[Mapping[str, Sequence[float]]], num_steps: int) -> dict[str, Any]:
    """Each kind of ours beside the faster of torch's lanes of that kind; a turn is as long as its slower rank says."""
    seconds = {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    pairs = {}
    for kind in (kind for kind, name in OURS.items() if name in seconds):
        ours = OURS[kind]
        rival = min(RIVALS[kind], key=lambda name: median(seconds[name]))
        ratios = (theirs / own for theirs, own in zip(seconds[rival], seconds[ours], strict=True))
        pairs[kind] = {"beside": rival, "ratio": Spread.of(ratios).fields(3)}
        if kind == "fp16":
            less = (theirs / own for theirs, own in zip(seconds[rival], seconds[FORGETFUL], strict=True))
            pairs[kind]["ratio_without_feedback"] = Spread.of(less).fields(3)
    spreads = {name: Spread.of(1000 * turn / num_steps for turn in turns) for name, turns in seconds.items()}
    return {"step_ms": {name: spread.fields(1) for name, spread in spreads.items()}, "pairs": pairs}


def compare_losses(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How far those of a kind lie apart over the first steps, relative to the loss."""
    gaps: dict[str, list[float]] = {}
    for kind in (kind for kind, name in OURS.items() if name in losses):
        own, *others = (losses[name][:NUM_COMPARED] for name in (OURS[kind], *RIVALS[kind]))
        gaps[kind] = [abs(loss - base) / base for other in others for base, loss in zip(own, other, strict=False)]
    # What is not a number agrees with nothing.
    agree = all(of and all(gap <= TOLERANCES[kind] for gap in of) for kind, of in gaps.items())
    widest = {kind: max(of, default=None) for kind, of in gaps.items()}
    last = {name: of[-1] for name, of in losses.items() if of}
    return {"loss_gaps": widest, "losses_agree": agree, "last_loss": last}


def judge(figures: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(figures) and all(
        of_link["losses_agree"]
        and set(of_link["pairs"]) == set(OURS)
        and all(pair["ratio"]["median"] >= GOAL for pair in of_link["pairs"].values())
        for of_link in figures.values()
    )


def _show(figures: Mapping[str, Any]) -> None:
    agree = "are alike" if figures["losses_agree"] else "ARE NOT ALIKE: the comparison is void"
    say(f"  losses of a kind {agree}")
    for name, spread in figures["step_ms"].items():
        sent, cpu = figures["bytes_per_step"][name] / 1e6, figures["cpu_ms"][name]
        say(f"  {name:<28} {Spread(**spread).words(1)} ms a step, {cpu:.0f} of processor time; {sent:.3f} MB sent")
    for kind, pair in figures["pairs"].items():
        say(f"  {kind}: {Spread(**pair['ratio']).words(3)} of the step rate of {pair['beside']}")
        if less := pair.get("ratio_without_feedback"):
            say(f"  {kind} without feedback: {Spread(**less).words(3)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, nargs="+", help="widths of the link, in each direction")
    parser.add_argument("--kind", choices=list(OURS), nargs="+", default=list(OURS), help="default: all")
    parser.add_argument("--repeats", type=int, default=0, help="rounds; default: by the width of the link")
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: by the width of the link")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether everything runs")
    parser.add_argument("--json-only", action="store_true", help="print the closing line alone")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    args = parser.parse_args()
    args.rate_mbit = args.rate_mbit or ([1000.0] if args.quick else list(ROUNDS))
    return args


if __name__ == "__main__":
    main()

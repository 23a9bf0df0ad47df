"""What does saving cost a training loop, and how fast is a checkpoint written and read, beside torch.save and DCP?

Two ranks train, each with at least 512 MiB of state of its own, over Gloo with one thread each. In every round each
contender saves once, in rotating order, and all of them fsync: the delay is the wall time of the three steps after a
save was asked for, less three undisturbed steps (the median of that round's). Then, while nothing trains: the rate of
our writer (its ``written`` report, before read-back) beside two dd with fsync and BLAKE3 over the same bytes; loading,
ours verified, beside DCP and torch.load, from the disk and from the page cache. At last the memory each contender takes
beside training, in processes of its own.

    python benchmarks/checkpoint.py                   all of it, some ten minutes on a quiet machine
    python benchmarks/checkpoint.py --rounds 12       more rounds
    python benchmarks/checkpoint.py --folder /mnt/x   on another disk
    python benchmarks/checkpoint.py --quick           tiny sizes: whether everything runs, no figures
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_rank import NUM_STEPS, Found, Plan, run_memory, run_rank, slowest
from checkpoint_savers import ASYNCHRONOUS, MAKERS
from checkpoint_work import MIB, Work
from results import Spread, conclude, say

from closeranks.testing.world import run_world

NUM_RANKS = 2
OURS = "closeranks"
BLOCKING_SHARE = 1 / 8
"""Of what torch.save delays, at most."""
RATE_SHARE = 0.85
"""Of the slower of dd and BLAKE3, at least."""
GOAL = (
    f"{NUM_RANKS} ranks, at least 512 MiB each: delay at most 1/8 of torch.save's and no more than the best of DCP's "
    f"async_save; write rate at least {RATE_SHARE} of min(dd with fsync, BLAKE3)"
)


def main() -> None:
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="closeranks-checkpoint-", dir=args.folder) as folder:
        work = Work(64, 3, 0.0) if args.quick else Work(target_s=args.step_s)
        plan = Plan(work, Path(folder), args.rounds, args.rates, tuple(args.only or MAKERS))
        say(f"{NUM_RANKS} ranks, {work.state_bytes / MIB:.0f} MiB of state each, {args.rounds} rounds, in {folder}")
        ranks: list[Found] = run_world(run_rank, NUM_RANKS, plan, timeout_s=args.timeout_s)
        memory = {} if args.no_memory else {name: _memory_mib(plan, name, args.timeout_s) for name in plan.names}
    figures = summarise(ranks) | {"memory_mib_per_rank": memory}
    figures["verdicts"] = judge(figures)
    _show(figures)
    conclude("checkpoint", figures, GOAL, not args.quick and all(figures["verdicts"].values()))


def summarise(ranks: Sequence[Found]) -> dict[str, Any]:
    state_bytes = ranks[0].state_bytes
    names = list(ranks[0].saved_s)
    saved = {name: slowest([rank.saved_s[name] for rank in ranks]) for name in names}
    plain = undisturbed([{name: rank.plain_s[name] for name in names} for rank in ranks])
    settled = {name: slowest([rank.settled_s[name] for rank in ranks]) for name in names}
    return {
        "state_mib_per_rank": round(state_bytes / MIB, 1),
        "batch": ranks[0].batch,
        "step_s": Spread.of(seconds / NUM_STEPS for seconds in plain).fields(4),
        "delay_s": {name: Spread.of(delays(saved[name], plain)).fields(4) for name in names},
        "until_durable_s": {name: Spread.of(settled[name]).fields(3) for name in names},
        "rate_mb_s": rates(ranks),
        "load_s": {
            name: Spread.of(slowest([rank.loads_s[name] for rank in ranks])).fields(4) for name in ranks[0].loads_s
        },
    }


def undisturbed(ranks: Sequence[Mapping[str, Sequence[float]]]) -> list[float]:
    """Three steps without a save, for each round: the median of what was measured in it before each save."""
    turns = [slowest([rank[name] for rank in ranks]) for name in ranks[0]]
    return [median(values) for values in zip(*turns, strict=True)]


def delays(saved: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [with_save - without for with_save, without in zip(saved, plain, strict=True)]


def rates(ranks: Sequence[Found]) -> dict[str, Any]:
    """Of all ranks together, in MB/s: what they wrote or hashed at once, by the time of the last to be done."""
    total = sum(rank.state_bytes for rank in ranks)
    found: dict[str, Any] = {}
    for name in ("written", "dd", "blake3"):
        seconds = slowest([rank.rates_s.get(name, []) for rank in ranks])
        found[name] = Spread.of(total / 1e6 / one for one in seconds).fields(0)
    committed = ranks[0].rates_s["committed"]
    found["committed, read back"] = Spread.of(total / 1e6 / one for one in committed).fields(0)
    found["share"] = round(found["written"]["median"] / min(found["dd"]["median"], found["blake3"]["median"]), 3)
    return found


def judge(figures: Mapping[str, Any]) -> dict[str, bool]:
    """By goal. A contender that was left out leaves its goal unmet: nothing was shown."""
    delay = {name: spread["median"] for name, spread in figures["delay_s"].items()}
    asynchronous = [delay[name] for name in ASYNCHRONOUS if name in delay]
    return {
        "an eighth of torch.save": "torch.save" in delay and delay[OURS] <= BLOCKING_SHARE * delay["torch.save"],
        "no more than DCP async_save": len(asynchronous) == len(ASYNCHRONOUS) and delay[OURS] <= min(asynchronous),
        "write rate": figures["rate_mb_s"]["share"] >= RATE_SHARE,
    }


def _memory_mib(plan: Plan, name: str, timeout_s: float) -> float:
    """Of the rank that took most."""
    return round(max(run_world(run_memory, NUM_RANKS, plan, name, timeout_s=timeout_s)) / MIB, 1)


def _show(figures: Mapping[str, Any]) -> None:
    say(f"  a step: {Spread(**figures['step_s']).words(3)} s, batch {figures['batch']}")
    for name, delay in sorted(figures["delay_s"].items(), key=lambda entry: entry[1]["median"]):
        durable = figures["until_durable_s"][name]["median"]
        memory = figures["memory_mib_per_rank"].get(name)
        taken = "" if memory is None else f", {memory:.0f} MiB beside training"
        say(f"  {name:<20} delays by {Spread(**delay).words(3)} s, durable after {durable:.2f} s{taken}")
    rate = figures["rate_mb_s"]
    words = ", ".join(f"{name} {rate[name]['median']:.0f}" for name in rate if name != "share")
    say(f"  MB/s of all ranks: {words}; written is {rate['share']:.2f} of the slower of dd and BLAKE3")
    for name, load in figures["load_s"].items():
        say(f"  load {name:<24} {Spread(**load).words(3)} s")
    for name, is_met in figures["verdicts"].items():
        say(f"  {name}: {'met' if is_met else 'missed'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help="default: 8, or 2 with --quick")
    parser.add_argument(
        "--rates", type=int, default=0, help="repeats of rates and loads; default: 5, or 1 with --quick"
    )
    parser.add_argument("--step-s", type=float, default=0.5, help="how long a step should take (default: 0.5)")
    parser.add_argument("--only", choices=list(MAKERS), action="append", help="these contenders; ours is always needed")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to save; default: the folder for temporary files"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the measurement of memory")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether everything runs")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each world of ranks")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 8)
    args.rates = args.rates or (1 if args.quick else 5)
    if args.only and OURS not in args.only:
        args.only.insert(0, OURS)
    return args


if __name__ == "__main__":
    main()

"""How long does a run stand still when one of its workers is killed? Ours, and a torchrun restart that works.

Four ranks on this machine, a small model; a worker is killed by SIGKILL from outside, at a time that it does not know.
Timed from the signal to the first step that is finished on all ranks again, restoring the state included. torchrun's
side is a plain PyTorch script (DDP, and FSDP2 for layouts whose state is spread) that keeps its state in /dev/shm after
every step, started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which a restart with Gloo fails. All lanes take
turns in every round; the ratio is taken within a round.

    python benchmarks/recovery.py                     three rounds of three strikes, about six minutes
    python benchmarks/recovery.py --rounds 1 --strikes 1 --rows ddp
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recovery_lanes import Recovery, strike_ours, strike_torchrun
from results import Spread, conclude, say

ROWS = {
    "ddp": ("layout.zero=0", "ddp"),
    "zero3": ("layout.zero=3", "fsdp2"),
    "tensor2": ("layout.tensor=2", "fsdp2"),
    "pipeline2": ("layout.pipeline=2", "fsdp2"),
}
"""Our layout, and the script under torchrun that it is compared with."""
GOAL = 3.0


def main() -> None:
    args = _arguments()
    ours: dict[str, list[list[Recovery]]] = {row: [] for row in args.rows}
    rivals: dict[str, list[list[Recovery]]] = {ROWS[row][1]: [] for row in args.rows}
    with tempfile.TemporaryDirectory(prefix="closeranks-recovery-") as folder:
        for number in range(args.rounds):
            for row, found in ours.items():
                found.append(strike_ours(Path(folder, f"{row}-{number}"), ROWS[row][0], args.strikes))
                _show(row, found[-1])
            for kind, found in rivals.items():
                found.append(strike_torchrun(Path(folder, f"{kind}-{number}"), kind, args.strikes))
                _show(f"torchrun {kind}", found[-1])
    figures = summarise(ours, rivals)
    for row, figure in figures.items():
        say(f"  {row:<10} {figure['words']}")
    goal = f"from the kill to the next good step at least {GOAL:g}x faster than a torchrun restart, in every layout"
    conclude("recovery", figures, goal, judge(figures, args.rows))


def summarise(
    ours: Mapping[str, Sequence[Sequence[Recovery]]], rivals: Mapping[str, Sequence[Sequence[Recovery]]]
) -> dict[str, Any]:
    """Every row beside its rival; the ratio of medians within each round."""
    return {row: _row(rounds, rivals[ROWS[row][1]]) for row, rounds in ours.items()}


def _row(ours: Sequence[Sequence[Recovery]], rivals: Sequence[Sequence[Recovery]]) -> dict[str, Any]:
    flat = [one for found in ours for one in found]
    seconds, other = Spread.of(_totals(ours)), Spread.of(_totals(rivals))
    pairs = zip(ours, rivals, strict=True)
    ratio = Spread.of(median(_totals([theirs])) / median(_totals([own])) for own, theirs in pairs)
    names = sorted({name for one in flat for name in one.parts})
    noticed = [one.noticed_s for one in flat if one.noticed_s is not None]
    return {
        "seconds": seconds.fields(3),
        "since_noticed_s": Spread.of(noticed).fields(3) if noticed else None,
        "torchrun_seconds": other.fields(3),
        "ratio": ratio.fields(2),
        "parts_s": {name: round(median(one.parts.get(name, 0.0) for one in flat), 3) for name in names},
        "most_redone": max(one.num_redone for one in flat),
        "words": f"{seconds.words(2)} s, torchrun {other.words(2)} s: {ratio.words(1)} times faster",
    }


def _totals(rounds: Sequence[Sequence[Recovery]]) -> list[float]:
    return [one.total_s for found in rounds for one in found]


def judge(figures: Mapping[str, Mapping[str, Any]], rows: Sequence[str]) -> bool:
    return set(rows) == set(ROWS) and all(figures[row]["ratio"]["median"] >= GOAL for row in rows)


def _show(name: str, found: Sequence[Recovery]) -> None:
    say(f"  {name:<16} back in {', '.join(f'{one.total_s:.2f}' for one in found)} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="launches of every lane (default: 3)")
    parser.add_argument("--strikes", type=int, default=3, help="workers killed in each (default: 3)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="layouts (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

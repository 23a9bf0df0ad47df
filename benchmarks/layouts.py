"""What does each layout cost beside the same layout written by hand, and beside DeepSpeed?

Two ranks on this machine train the same Llama on the same samples from the same weights, in float32 over Gloo, with
the same clipping, schedule and fused AdamW. Each contender is a team of processes of its own; the teams take turns of a
few steps, in rotating order, and ratios of step rates are taken within each round. The losses of a row must agree, else
its comparison is void. Rows: ``zero1`` (optimizer state split), ``zero3`` (all state split), ``tensor`` (matrices
split), ``pipeline`` (blocks in stages). A contender that is not installed or fails is named and left out.

    python benchmarks/layouts.py                      all rows, about ten minutes on a quiet machine
    python benchmarks/layouts.py --row zero3          one row
    python benchmarks/layouts.py --quick              tiny sizes: whether everything runs, no figures
    pip install -e '.[peers]'                         brings DeepSpeed
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layouts_rows import ROWS, Entry, Row
from results import Spread, conclude, say
from rounds import order
from teams import Team, TeamError

NUM_RANKS = 2
TOLERANCE = 1e-4
"""Of the loss: sums are taken in another order, and steps amplify it."""
NUM_COMPARED = 10


def main() -> None:
    args = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet = contextlib.redirect_stdout(io.StringIO()) if args.json_only else contextlib.nullcontext()
    with quiet:
        figures = {name: measure(_sized(ROWS[name], args), args) for name in args.row or ROWS}
    goal = "; ".join(f"{name}: {ROWS[name].goal_in_words}" for name in figures) + "; equal losses"
    conclude("layouts", figures, goal, not args.quick and all(row["met"] for row in figures.values()))


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    say(f"{row.name}: {args.repeats} rounds, turns of {row.num_steps} steps")
    with tempfile.TemporaryDirectory(prefix="closeranks-layouts-") as folder:
        contest = Contest(row, Path(folder), args)
        try:
            contest.open()
            contest.take_rounds()
        finally:
            losses = contest.close()
    figures = {"size": row.size_in_words, "left_out": contest.left_out}
    figures |= compare(contest.seconds, row) | compare_losses(losses)
    figures["cpu_ms"] = {
        name: round(1000 * Spread.of(turns).median / row.num_steps, 2) for name, turns in contest.cpu.items()
    }
    figures["met"] = judge(figures, row)
    _show(figures, row)
    return figures


@dataclass
class Contest:
    """The teams of a row, and what was measured of them."""

    row: Row
    folder: Path
    args: argparse.Namespace
    teams: dict[str, Team] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def open(self) -> None:
        """One by one, each with a turn to warm up: two cores are enough for one team."""
        for entry in self.row.entries:
            if not entry.is_installed:
                self._leave_out(entry.name, "not installed")
                continue
            try:
                self.teams[entry.name] = self._team(entry)
                self.teams[entry.name].take(self.row.num_steps)
            except TeamError as error:
                self._leave_out(entry.name, str(error))
        self.seconds = {name: [] for name in self.teams}
        self.cpu = {name: [] for name in self.teams}

    def take_rounds(self) -> None:
        for number in range(self.args.repeats if self.teams else 0):
            for name in order(list(self.teams), number):
                try:
                    turn = self.teams[name].take(self.row.num_steps)
                except TeamError as error:
                    self._leave_out(name, str(error))
                    continue
                self.seconds[name].append(turn.seconds)
                self.cpu[name].append(turn.cpu_seconds)

    def close(self) -> dict[str, list[float]]:
        """The losses of every team that came to the end."""
        return {name: team.close() for name, team in self.teams.items()}

    def _team(self, entry: Entry) -> Team:
        # One turn to warm up, and one step that is never taken: closeranks would evaluate after its last.
        num_steps = (self.args.repeats + 1) * self.row.num_steps + 1
        work = self.row.work(entry, num_steps, self.folder)
        return Team(NUM_RANKS, self.args.timeout_s, entry.make, work, *entry.options)

    def _leave_out(self, name: str, why: str) -> None:
        say(f"  {name}: left out ({why})")
        self.left_out[name] = why
        self.seconds.pop(name, None)
        self.cpu.pop(name, None)
        if name in self.teams:
            self.teams.pop(name).close()


def compare(seconds: Mapping[str, Sequence[float]], row: Row) -> dict[str, Any]:
    """Step rates relative to the row's baseline, and ours relative to each rival, round by round."""
    if row.baseline not in seconds:
        return {"baseline": None, "step_ms": None, "ratio": {}, "beside": {}}
    base = seconds[row.baseline]
    step_ms = {name: Spread.of(1000 * turn / row.num_steps for turn in turns) for name, turns in seconds.items()}
    return {
        "baseline": row.baseline,
        "step_ms": {name: spread.fields(2) for name, spread in step_ms.items()},
        "ratio": {name: _ratio(base, turns).fields(4) for name, turns in seconds.items()},
        "beside": {
            ours: {rival: _ratio(seconds[rival], seconds[ours]).fields(4) for rival in goals if rival in seconds}
            for ours, goals in row.goals.items()
            if ours in seconds
        },
    }


def _ratio(theirs: Sequence[float], own: Sequence[float]) -> Spread:
    return Spread.of(their / mine for their, mine in zip(theirs, own, strict=True))


def compare_losses(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How far the contenders' losses lie apart over the first steps, as a share of the loss."""
    first = [values[:NUM_COMPARED] for values in losses.values()]
    gaps = [(max(step) - min(step)) / min(step) for step in zip(*first, strict=False)]
    # One alone proves nothing, and a loss that is not a number agrees with none.
    agree = len(first) > 1 and bool(gaps) and all(gap <= TOLERANCE for gap in gaps)
    return {"loss_gap": max(gaps, default=None), "losses_compared": len(gaps), "losses_agree": agree}


def judge(figures: Mapping[str, Any], row: Row) -> bool:
    """Every one of ours reaches what its goals ask beside each rival; a rival that is not here asks nothing."""
    if not figures["losses_agree"] or set(row.goals) - set(figures["beside"]):
        return False
    beside = figures["beside"]
    return all(
        ratio["median"] >= row.goals[ours][rival] for ours, rivals in beside.items() for rival, ratio in rivals.items()
    )


def _show(figures: Mapping[str, Any], row: Row) -> None:
    num, gap = figures["losses_compared"], figures["loss_gap"] or 0
    agree = f"agree (at most {gap:.1e} apart)" if figures["losses_agree"] else "DO NOT AGREE: the comparison is void"
    say(f"  {figures['size']}; losses of the first {num} steps {agree}")
    for name, ratio in sorted(figures["ratio"].items(), key=lambda item: -item[1]["median"]):
        step = f"{figures['step_ms'][name]['median']:.1f} ms a step, {figures['cpu_ms'][name]:.1f} of processor time"
        say(f"  {name:<16} {ratio['median']:.4f}  ({ratio['low']:.4f} to {ratio['high']:.4f})  {step}")
    for ours, rivals in figures["beside"].items():
        for rival, ratio in rivals.items():
            wanted = row.goals[ours][rival]
            met = "met" if ratio["median"] >= wanted else "missed"
            say(f"  {ours} beside {rival}: {Spread(**ratio).words(4)}, goal {wanted} {met}")


def _sized(row: Row, args: argparse.Namespace) -> Row:
    if args.quick:
        tiny = {"preset": "tiny", "num_layers": 4, "seq_len": 16, "batch": 1, "num_steps": 3}
        return replace(row, **tiny, num_micro=min(row.num_micro, 4))
    asked = {"batch": args.batch, "seq_len": args.seq_len, "num_steps": args.block, "num_layers": args.layers}
    return replace(row, **{key: value for key, value in asked.items() if value})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=list(ROWS), action="append", help="may be given several times; default: all")
    parser.add_argument("--repeats", type=int, default=0, help="rounds; default: 12, or 2 with --quick")
    parser.add_argument("--block", type=int, default=0, help="steps of a turn; default: 4")
    parser.add_argument("--batch", type=int, default=0, help="samples of a micro-batch; default: the row's")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens of a sample; default: the row's")
    parser.add_argument("--layers", type=int, default=0, help="blocks of the Llama; default: the row's")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether everything runs")
    parser.add_argument("--json-only", action="store_true", help="print the closing line alone")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for a team's whole life")
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.quick else 12)
    return args


if __name__ == "__main__":
    main()

"""How much work does a run get done under repeated faults, and is the result the same?

One job on four workers of this machine trains for half an hour under real faults: a light mix (SIGKILL, cut
connections, SIGTERM), or all kinds that are possible here, 62 of them at random seconds. The number of steps made is
compared with the rate of the same run in calm periods, before, between and after two storms of faults. Then the job
runs once more without a fault, just as many steps: all losses, all samples and the last state must be equal in every
bit. What the run holds (memory, descriptors, snapshot slots, shared memory) is compared between its first and its last
calm period.

    python benchmarks/soak.py --mix light             about 35 minutes, and as long again for the run without faults
    python benchmarks/soak.py --mix all --out runs/soak-all
    python benchmarks/soak.py --minutes 3 --waiting   steps that mostly wait, as for a device: the second run is short
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_runs import ROOT, LaneFailed, Launched, lines_of
from results import conclude, say
from soak_figures import Course, Done, Struck, by_kind, costs, growth, parts_of, throughput
from soak_lane import Orders, write_orders
from soak_page import write_page
from soak_picture import draw
from soak_plan import LIGHT, Plan, draw_plan
from soak_watch import Sample, adopt_orphans, left_over, sample

from closeranks.lab.drills.drill import possible_kinds
from closeranks.lab.drills.recorded_run import read_recorded_run, same_losses, same_samples, state_difference
from closeranks.run.job.run_folder import make_unused_folder

NUM_RANKS = 4
GOALS = {"light": 0.97, "all": 0.90}
MOST_SPREAD = 0.1
"""Calms that are farther apart say that somebody else used the machine: their rate is no measure."""
_LEAST_MINUTES, _LEAST_FAULTS = 30.0, 60
_SAMPLE_S = 3.0
_START_S, _DRAIN_S = 120.0, 60.0
_FLOOR_S = 3.0
"""Steps take less than a second: who stands still is given up two seconds earlier than by default."""
_SAVES = 40
"""Steps between checkpoints where a disk runs full: a save must meet it."""


@dataclass(frozen=True, slots=True)
class Equality:
    """The struck run beside the one that never failed."""

    num_steps: int
    losses: bool
    samples: bool
    state: str
    """In what the last states differ; empty: in nothing."""

    @property
    def is_equal(self) -> bool:
        return self.losses and self.samples and not self.state


def main() -> None:
    args = _arguments()
    kinds, without = (LIGHT, {}) if args.mix == "light" else _all_kinds()
    for kind, reason in without.items():
        say(f"  {kind} is left out, it is not possible here: {reason}")
    plan = draw_plan(kinds, args.minutes, args.faults, args.seed, NUM_RANKS)
    folder = make_unused_folder((args.out or ROOT / "runs" / f"soak-{args.mix}").absolute())
    say(f"  {len(plan.faults)} faults within {plan.ends_s / 60:.1f} minutes; everything goes to {folder}")
    adopt_orphans()
    samples, left = storm(folder, plan, args)
    figures, course, found = judge_run(folder, plan, samples, left)
    say(f"  {figures['throughput']['ratio']:.1%} of the undisturbed steps; now the same without faults")
    equality = compare(folder, max(line.step for line in course.new), args)
    figures["divergence"] = {"equal": equality.is_equal, "steps": equality.num_steps, "state": equality.state}
    figures["divergence"] |= {"losses_equal": equality.losses, "samples_equal": equality.samples}
    figures = {"mix": args.mix, "minutes": args.minutes, "seed": args.seed, "layout": args.layout, **figures}
    figures["load"] = [round(each, 2) for each in os.getloadavg()]
    draw(course, plan, found, figures["throughput"], folder / "soak.png", f"soak, {args.mix} mix")
    write_page(folder / "soak.md", figures, found, args.mix, GOALS[args.mix])
    goal = (
        f"{GOALS[args.mix]:.0%} of undisturbed steps with {_LEAST_FAULTS} faults or more in {_LEAST_MINUTES:g} minutes"
    )
    conclude(
        "soak",
        figures,
        f"{goal}, all survived, nothing diverges, nothing leaks; calms at most {MOST_SPREAD:.0%} apart",
        judge(figures),
    )


def _all_kinds() -> tuple[tuple[str, ...], dict[str, str]]:
    asked, without = possible_kinds(NUM_RANKS)
    return asked.kinds, without


def storm(folder: Path, plan: Plan, args: argparse.Namespace) -> tuple[list[Sample], list[str]]:
    """The struck run, looked at from outside while it lasts; what it left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    hooks = ['run.hooks=["soak_wait:Wait"]'] if args.waiting else []
    saves = [f"checkpoint.every={_SAVES}"] if any(fault.kind == "diskfull" for fault in plan.faults) else []
    most = 4 * len(plan.faults) + 10
    limits = [f"elastic.{name}={most}" for name in ("max_faults", "max_repeats", "max_host_faults")]
    limits += [
        "elastic.snapshot_every=1",
        "elastic.slow_steps=3",
        "elastic.first_s=20.0",
        f"elastic.hang_floor_s={_FLOOR_S}",
    ]
    overrides = (*_job(args), *limits, *hooks, *saves, f"run.folder={folder / 'struck'}")
    job = str(ROOT / "benchmarks" / "soak.toml")
    strikes = str(folder / "strikes.jsonl")
    write_orders(Orders(job, overrides, NUM_RANKS, str(folder / "struck"), strikes, plan), folder / "orders.json")
    command = ["benchmarks/soak_lane.py", str(folder / "orders.json")]
    with Lane(command, folder / "struck-printed") as lane:
        samples = lane.watch(_START_S + plan.ends_s + _DRAIN_S)
    return samples, left_over(lane.pid, samples)


class Lane(Launched):
    """A run that is only looked at."""

    def watch(self, patience_s: float) -> list[Sample]:
        """Until it ends, well, within this time."""
        samples: list[Sample] = []
        deadline, next_at = time.monotonic() + patience_s, 0.0
        while (status := self._process.poll()) is None:
            if time.monotonic() > deadline:
                raise LaneFailed(f"it did not end within {patience_s:.0f} s:\n{self._log_tail()}")
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + _SAMPLE_S
                if (seen := sample(self.pid)) is not None:
                    samples.append(seen)
            time.sleep(0.1)
        if status != 0:
            raise LaneFailed(f"it ended with status {status}:\n{self._log_tail()}")
        return samples


def judge_run(
    folder: Path, plan: Plan, samples: Sequence[Sample], left: Sequence[str]
) -> tuple[dict[str, Any], Course, list[Any]]:
    """The figures that the struck run alone gives."""
    began, *strikes = lines_of(folder / "strikes.jsonl")
    began_at = float(began["began_at"])
    steps = [line for line in lines_of(folder / "struck" / "metrics" / "rank-00000.jsonl") if line["event"] == "step"]
    course = Course([Done(line["at"] - began_at, line["step"]) for line in steps])
    struck = [
        Struck(line["at"] - began_at, line["at_s"], line["kind"], line["rank"], line["generation"], line["note"])
        for line in strikes
    ]
    made = throughput(course, plan)
    events = read_recorded_run(folder / "struck").events
    found = costs(struck, events, began_at, course, made["step_s"])
    calms = [window for window in plan.windows if not window.is_storm]
    near = [
        [one for one in samples if calm.begins_s <= one.at - began_at < calm.ends_s] for calm in (calms[0], calms[-1])
    ]
    figures = {
        "throughput": made,
        "faults": {"planned": len(plan.faults), "struck": len(struck), "survived": sum(one.survived for one in found)},
        "kinds": by_kind(found),
        "parts_s": parts_of(found),
        "growth": growth(*near),
        "left_over": list(left),
    }
    return figures, course, found


def compare(folder: Path, num_steps: int, args: argparse.Namespace) -> Equality:
    """The same job once more, as far, with nobody to strike it."""
    quiet = folder / "quiet"
    overrides = [*_job(args), "elastic.enabled=false", f"train.steps={num_steps}", f"run.folder={quiet}"]
    command = ["-m", "closeranks", "train", "benchmarks/soak.toml", "-n", str(NUM_RANKS), *overrides]
    with Lane(command, folder / "quiet-printed") as lane:
        lane.watch(_START_S + 4 * 60 * args.minutes)
    whole, struck = (_up_to(read_recorded_run(each), num_steps) for each in (quiet, folder / "struck"))
    return Equality(
        num_steps,
        losses=same_losses(whole, struck, 1, num_steps),
        samples=same_samples(whole, struck) is True,
        state=state_difference(quiet, folder / "struck"),
    )


def _up_to(course: Any, num_steps: int) -> Any:
    """Without what was begun when the run was drained."""
    return replace(course, samples={step: taken for step, taken in course.samples.items() if step <= num_steps})


def _job(args: argparse.Namespace) -> list[str]:
    """Two micro-batches a worker and step."""
    sizes = [f"train.global_batch={args.batch}", f"train.micro_batch={args.batch // (2 * NUM_RANKS)}"]
    return [f"layout={args.layout}", *sizes]


def judge(figures: Mapping[str, Any]) -> bool:
    faults = figures["faults"]
    is_long = figures["minutes"] >= _LEAST_MINUTES and faults["struck"] >= _LEAST_FAULTS
    made = figures["throughput"]
    is_measured = made["calm_spread"] <= MOST_SPREAD
    return is_long and is_measured and is_sound(figures) and made["ratio"] >= GOALS[figures["mix"]]


def is_sound(figures: Mapping[str, Any]) -> bool:
    """Whatever the rate: every fault struck and was survived, nothing diverged, nothing leaked."""
    faults = figures["faults"]
    has_leaked = bool(figures["left_over"]) or any(each["is_leak"] for each in figures["growth"].values())
    is_whole = faults["planned"] == faults["struck"] == faults["survived"]
    return is_whole and not has_leaked and figures["divergence"]["equal"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=list(GOALS), default="light", help="which faults (default: light)")
    parser.add_argument("--minutes", type=float, default=30.0, help="under faults; the calms come on top (default: 30)")
    parser.add_argument("--faults", type=int, default=0, help="how many; default: 62 in 30 minutes")
    parser.add_argument("--seed", type=int, default=7, help="the same seed strikes at the same seconds (default: 7)")
    parser.add_argument("--layout", default="zero=0", help="of the four workers (default: zero=0)")
    parser.add_argument("--batch", type=int, default=16, help="samples a step, a multiple of 8 (default: 16)")
    parser.add_argument("--waiting", action="store_true", help="every step waits 0.4 s more, as for a device")
    parser.add_argument("--out", type=Path, default=None, help="a folder to be made (default: runs/soak-MIX)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

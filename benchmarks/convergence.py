"""Do compressed gradients and local SGD replicas learn what exact sums learn?

Every compressor, and DiLoCo, on two workers, with whole replicas (``layout.zero=0``) and with state that is sharded
(``layout.zero=3``; for what trains apart, two replicas of two workers each): the digits to an accuracy, and a small
Llama on the standard library's source to a gap in held-out loss against the exact run of the same seed.

    python benchmarks/convergence.py                       about 25 minutes on two quiet cores
    python benchmarks/convergence.py --only digits --kinds int8
    python benchmarks/convergence.py --short               whether it runs
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import begin, conclude, say

from closeranks.core.errors import UserError
from closeranks.lab.compare.comparison import run_comparison
from closeranks.lab.compare.result_table import SettingRow

ACCURACY = 0.97
"""Of held-out digits, by the mean over seeds."""
GAPS = {"bf16": 0.05, "fp16": 0.05, "int8": 0.05, "topk": 0.8, "powersgd": 0.15, "onebit": 0.3}
GAPS |= {"diloco": 0.35, "diloco, int8": 0.35}
"""Of held-out loss, above the exact run's after 200 steps: what docs/sync.md states."""
KINDS: dict[str, tuple[str, ...]] = {
    **{name: (f"sync.compress.name={name}",) for name in ("bf16", "fp16", "int8", "topk", "powersgd")},
    "onebit": ("sync.compress.name=onebit", "sync.compress.warmup=0.2"),
    "diloco": ("sync.local.every=20",),
    "diloco, int8": ("sync.local.every=20", "sync.compress.name=int8"),
}
EXACT = "exact"
SPREADS = {"replicas": ("layout.zero=0",), "sharded": ("layout.zero=3",)}
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Task:
    job: Path
    budget: str
    short: str
    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    metric: str


TASKS = {
    "digits": Task(
        _HERE.parent / "examples" / "digits.toml",
        "epochs = 16",
        "epochs = 0.5",
        ("train.eval_every=0",),
        (0, 1),
        "accuracy",
    ),
    "text": Task(_HERE / "sync.toml", "steps = 200", "steps = 8", ("train.micro_batch=2",), (0,), "loss"),
}


def main() -> None:
    args = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Any] = {}
    for name in args.only:
        for spread in args.spreads:
            say(f"--- {name}, {spread}")
            rows = compare(name, spread, args)
            figures[f"{name}, {spread}"] = {row.name: tell(row, TASKS[name].metric) for row in rows}
    goal = (
        f"on replicas and on sharded state every kind reaches {ACCURACY:g} of the digits, and ends within its gap of "
        f"the exact run's held-out loss on text: {GAPS}"
    )
    conclude("convergence", figures, goal, not args.short and judge(figures))


def compare(name: str, spread: str, args: argparse.Namespace) -> Sequence[SettingRow]:
    """The exact run, and every kind beside it."""
    file = args.folder / f"{name}-{spread}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(comparison(TASKS[name], spread, args.kinds, is_short=args.short))
    result = run_comparison(file, [f"folder={args.folder / file.stem}"])
    if broken := [row for row in result.tables[0].rows if not row.is_sound]:
        raise UserError("; ".join(f"{row.name}: {row.reason}" for row in broken))
    return result.tables[0].rows


def comparison(task: Task, spread: str, kinds: Sequence[str], *, is_short: bool) -> str:
    """The text of a comparison."""
    lines = [f"job = {json.dumps(str(task.job))}", f"seeds = {list(task.seeds)}", "workers = 2"]
    lines += [f"set = {json.dumps([*task.changes, *SPREADS[spread]])}"]
    if task.metric != "loss":
        lines += [f'target = {{ metric = "{task.metric}", value = {ACCURACY}, of = "evaluation" }}']
    lines += ["[budget]", task.short if is_short else task.budget]
    for kind in (EXACT, *kinds):
        own = list(KINDS.get(kind, ()))
        lines += ["", "[[setting]]", f"name = {json.dumps(kind)}"]
        if spread == "sharded" and kind.startswith("diloco"):  # a replica is then two workers
            own += ["layout.shard=2"]
            lines += ["workers = 4"]
        lines += [f"set = {json.dumps(own)}"]
    return "\n".join(lines) + "\n"


def tell(row: SettingRow, metric: str) -> dict[str, float]:
    assert row.final is not None
    assert row.final_gap is not None
    figures = {metric: row.final.mean, "lowest": row.final.low, "highest": row.final.high, "gap": row.final_gap.mean}
    return {key: round(value, 4) for key, value in figures.items()}


def judge(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> bool:
    """Whether every kind was run on every task and spread, and learned enough."""
    wanted = {f"{name}, {spread}" for name in TASKS for spread in SPREADS}
    if figures.keys() != wanted or any(rows.keys() != {EXACT, *KINDS} for rows in figures.values()):
        return False
    reached = [row["accuracy"] >= ACCURACY for rows in figures.values() for row in rows.values() if "accuracy" in row]
    gaps = [
        rows[kind]["gap"] <= most for rows in figures.values() if "loss" in rows[EXACT] for kind, most in GAPS.items()
    ]
    return all(reached) and all(gaps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TASKS), nargs="+", default=list(TASKS), help="default: both")
    parser.add_argument("--spreads", choices=list(SPREADS), nargs="+", default=list(SPREADS), help="default: both")
    parser.add_argument("--kinds", choices=list(KINDS), nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"), help="where everything goes")
    parser.add_argument("--short", action="store_true", help="a few steps of each run: whether it runs")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

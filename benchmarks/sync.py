"""What do strategies gain on a narrow link, what do they cost, and how many bytes do they send?

Four comparisons of one job, a Llama of 3.5 million parameters on the standard library's source, on hosts that are
network namespaces with links of a real width (``sync_link.toml``, ``sync_bytes.toml``, ``sync_hosts.toml``, each of
which ``closeranks compare`` runs as well): the time to the same held-out loss on two hosts at 100 Mbit/s and at
1 Gbit/s; bytes at the interface for each compressor; and a hierarchical sum beside a flat one on two hosts of two
workers. Tables and pictures stay in the folder, and runs that are finished there are not run again. Needs root.

    python benchmarks/sync.py                        about 50 minutes
    python benchmarks/sync.py --only bytes hosts     some of: slow, fast, bytes, hosts
    python benchmarks/sync.py --steps 12 --seeds 0   whether it runs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import begin, conclude, say

from closeranks.core.errors import UserError
from closeranks.facts.communication.collective_algorithms import Topology
from closeranks.facts.communication.collective_cost import inter_host_bytes
from closeranks.lab.compare.comparison import run_comparison
from closeranks.lab.compare.result_table import RunStat, SettingRow
from closeranks.telemetry.run_log.run_history import load_history
from hosts import require_hosts

PARTS = {
    "slow": ("sync_link.toml", ("network.mbit=100",)),
    "fast": ("sync_link.toml", ("network.mbit=1000",)),
    "bytes": ("sync_bytes.toml", ()),
    "hosts": ("sync_hosts.toml", ()),
}
PLAIN, DILOCO = "plain", "DiLoCo"
TIMES_FASTER = 5.0
TIMES_FEWER = {"1-bit": 10.0, "PowerSGD, rank 4": 10.0, "top-k, 1%": 50.0}
WITHIN = 0.1
"""Of what the formula says: frames have headers, and the agents of hosts speak to each other too."""
GOAL = (
    "at 100 Mbit/s the best compressed setting and DiLoCo reach the loss at least 5 times as fast; PowerSGD and "
    "1-bit send at least 10 times fewer bytes, top-k 50 times; hierarchical is faster than flat, with bytes as computed"
)
_HERE = Path(__file__).parent


def main() -> None:
    args = _arguments()
    require_hosts()
    figures: dict[str, Any] = {}
    for part in args.only:
        say(f"--- {part}")
        rows, num_params = compare(part, args)
        figures[part] = tell_hosts(rows, num_params) if part == "hosts" else {row.name: tell(row) for row in rows}
    conclude("sync", figures, GOAL, args.steps == 0 and judge(figures))


def compare(part: str, args: argparse.Namespace) -> tuple[tuple[SettingRow, ...], int]:
    """The rows of one comparison, and the size of the model."""
    file, words = PARTS[part]
    asked = (f"budget.steps={args.steps}",) if args.steps else ()
    if part in ("slow", "fast") and args.seeds:
        asked += (f"seeds={args.seeds}",)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    comparison = run_comparison(_HERE / file, [*words, *asked, f"folder={args.folder / part}"])
    if broken := [row for row in comparison.tables[0].rows if not row.is_sound]:
        raise UserError("; ".join(f"{row.name}: {row.reason}" for row in broken))
    started = load_history(Path(comparison.outcomes[0].folder)).started
    return comparison.tables[0].rows, started.num_params if started else 0


def tell(row: SettingRow) -> dict[str, Any]:
    """What a row says, in figures that fit a line."""
    figures = {
        "steps_per_s": _mean(row.steps_per_s, 3),
        "kb_per_step": _mean(row.bytes_per_step, 1, 1e-3),
        "times_fewer_bytes": round(1 / row.bytes_ratio, 2) if row.bytes_ratio else None,
        "seconds_to_loss": _mean(row.seconds_to_target, 1),
        "times_as_fast": row.speedup and [round(value, 2) for value in (row.speedup.low, row.speedup.high)],
        "eval_loss": row.eval_loss and [round(value, 4) for value in (row.eval_loss.low, row.eval_loss.high)],
    }
    return {key: value for key, value in figures.items() if value is not None}


def tell_hosts(rows: Sequence[SettingRow], num_params: int) -> dict[str, Any]:
    """Each way of summing beside what its formula says leaves a host."""
    figures = {}
    for row in rows:
        assert row.bytes_per_step is not None
        algorithm = "hierarchical" if row.name == "hierarchical" else "ring"
        computed = inter_host_bytes(algorithm, 4 * num_params, Topology(2, 2))
        a_host = row.bytes_per_step.mean / 2
        figures[row.name] = {
            **tell(row),
            "mb_a_host": round(a_host / 1e6, 2),
            "mb_computed": round(computed / 1e6, 2),
            "times_computed": round(a_host / computed, 3),
            "rate_low": round(row.steps_per_s.low, 3) if row.steps_per_s else None,
            "rate_high": round(row.steps_per_s.high, 3) if row.steps_per_s else None,
        }
    return figures


def judge(figures: Mapping[str, Any]) -> bool:
    """Whether every part was run and shows what it shall."""
    if figures.keys() != PARTS.keys():
        return False
    slow, sent, hosts = figures["slow"], figures["bytes"], figures["hosts"]
    gains = {name: row["times_as_fast"][0] for name, row in slow.items() if row.get("times_as_fast")}
    diloco = [gain for name, gain in gains.items() if name.startswith(DILOCO)]
    compressed = [gain for name, gain in gains.items() if not name.startswith((DILOCO, PLAIN))]
    return (
        max(diloco, default=0.0) >= TIMES_FASTER
        and max(compressed, default=0.0) >= TIMES_FASTER
        and all(sent[name]["times_fewer_bytes"] >= times for name, times in TIMES_FEWER.items())
        and hosts["hierarchical"]["rate_low"] > hosts["flat"]["rate_high"]
        and all(abs(row["times_computed"] - 1) <= WITHIN for row in hosts.values())
    )


def _mean(stat: RunStat | None, digits: int, scale: float = 1.0) -> float | None:
    return None if stat is None else round(stat.mean * scale, digits)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/sync"), help="where everything goes")
    parser.add_argument("--steps", type=int, default=0, help="of each run; default: as the files say")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: as sync_link.toml says")
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)

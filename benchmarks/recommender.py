"""Do tables that servers keep train beyond a worker's memory, as well as a dense table does, and at which price?

Four questions, on processes of this machine and in a network namespace of its own, whose loopback counts every byte:

    memory  two workers under a memory limit of a control group and two servers; the rows that servers keep come to
            more than three times the limit. A dense table of that size under the same limit is killed by the kernel
    auc     a served run and a plain loop in one process with dense tables and the same rule, on the same samples
    bytes   what a touched row costs on the wire, with tables of 10,000 to a billion rows and two sizes of a batch
    ddp     two workers and a server beside two workers of a plain DistributedDataParallel loop with dense gradients

    python benchmarks/recommender.py                    about six minutes; needs root
    python benchmarks/recommender.py --only ddp --rounds 3
    python benchmarks/recommender.py --torchrec VENV/bin/python     torchrec as a third in ``ddp``

torchrec needs a fbgemm-gpu-cpu that was built for this torch: 1.8.0 for torch 2.13.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recommender_work import dense_loop, plain_ddp, served, touched_rows
from results import Spread, begin, conclude, say

from closeranks.core.errors import SetupError
from closeranks.elastic.faults.cgroups import MEMORY, ControlGroup, find_cgroup_parent
from closeranks.testing import WorldError, run_world

_MIB = 1 << 20
LIMIT = 128 * _MIB
_APART = "CLOSERANKS_BENCHMARK_APART"
_GOAL = (
    "rows 3x a worker's memory limit, AUC within 0.1% of dense, bytes proportional to touched rows, 5x fewer than DDP"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "auc", "bytes", "ddp"), nargs="+", help="some of the questions")
    parser.add_argument("--rounds", type=int, default=5, help="of ddp")
    parser.add_argument("--samples", type=int, default=200_000, help="of auc")
    parser.add_argument("--torchrec", default="", help="a Python that has torchrec")
    args = parser.parse_args()
    only = args.only or ("memory", "auc", "bytes", "ddp")
    apart()
    figures: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory(prefix="closeranks-recommender-") as folder:
        if "memory" in only:
            figures["memory"] = memory(Path(folder))
            met &= figures["memory"]["times_the_limit"] >= 3 and figures["memory"]["dense_is_killed"]
        if "auc" in only:
            figures["auc"] = auc(Path(folder), args.samples)
            met &= figures["auc"]["relative_difference"] <= 1e-3
        if "bytes" in only:
            figures["bytes"] = bytes_a_row(Path(folder))
            met &= figures["bytes"]["largest_over_smallest"] <= 1.05
        if "ddp" in only:
            figures["ddp"] = beside_ddp(Path(folder), args.rounds, args.torchrec)
            met &= figures["ddp"]["times_fewer_bytes"] >= 5 and figures["ddp"]["times_faster"] > 1
    conclude("recommender", figures, _GOAL, met)


def apart() -> None:
    """Run this script again in a network namespace of its own."""
    if os.environ.get(_APART):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if os.geteuid():
        raise SetupError("control groups and network namespaces need root", "Run it as root.")
    command = ["unshare", "--net", sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, _APART: "1"})


def tables_of(**model: Any) -> dict[str, dict[str, Any]]:
    """A job on the click log; what model and data have in common is given once."""
    common = {name: model[name] for name in ("features", "rows") if name in model}
    return {
        "model": {"name": "recommender", **model},
        "data": {"name": "clicks", **common, "shuffle": "none"},
        "optim": {"lr": 1e-2, "weight_decay": 0.0, "tables": {"rule": "adagrad", "lr": 5e-2}},
        "checkpoint": {"save": False},
    }


def memory(folder: Path) -> dict[str, Any]:
    steps, dim = 44, 64
    tables = tables_of(features=4, rows=4_000_000, dim=dim)
    tables["data"] |= {"zipf": 0.0, "max_ids": 2, "num_samples": 1 << 20, "eval_fraction": 0.0}
    tables["train"] = {"steps": steps, "global_batch": 8192, "micro_batch": 1024}
    group = ControlGroup(find_cgroup_parent(MEMORY))
    dense = ControlGroup(find_cgroup_parent(MEMORY))
    try:
        for one in (group, dense):
            one.limit_memory(LIMIT)
        tables["sync"] = {"server": {"count": 2}}
        ranks = run_world(served, 4, folder / "memory", tables, str(group.path / "cgroup.procs"), timeout_s=500)
        kept = sum(rank["kept_bytes"] for rank in ranks)
        is_killed = False
        try:
            alone = {**tables, "sync": {}, "optim": {"lr": 1e-2}}
            run_world(served, 1, folder / "dense", alone, str(dense.path / "cgroup.procs"), timeout_s=200)
        except WorldError as error:
            is_killed = "SIGKILL" in str(error) and dense.num_oom_kills > 0
        oom_kills = group.num_oom_kills
    finally:
        group.remove(30.0)
        dense.remove(30.0)
    figures = {
        "limit_mib_of_both_workers": LIMIT // _MIB,
        "kept_mib": round(kept / _MIB),
        "times_the_limit": round(kept / LIMIT, 2),
        "rows": sum(rank["num_rows"] for rank in ranks),
        "named_gib": round(4 * 4_000_000 * dim * 4 / 1024**3, 1),
        "steps_per_s": round(ranks[0]["steps_per_s"], 2),
        "kills": oom_kills,
        "dense_is_killed": is_killed,
    }
    say(f"memory: {figures}")
    return figures


def auc(folder: Path, num_samples: int) -> dict[str, Any]:
    """Both see the same samples in the same order."""
    batch = 500
    tables = tables_of(features=6, rows=2000, dim=16)
    tables["data"] |= {"num_samples": num_samples, "max_ids": 2, "eval_fraction": min(0.5, 20_000 / num_samples)}
    tables["train"] = {"steps": num_samples // batch, "global_batch": batch, "micro_batch": 125}
    tables["sync"] = {"server": {"count": 2}}
    found = run_world(served, 4, folder / "auc", tables, "", timeout_s=500)[0]
    (expected,) = run_world(dense_loop, 1, tables, timeout_s=500)
    figures = {
        "served": round(found["auc"], 6),
        "dense": round(expected["auc"], 6),
        "best": round(found["best_auc"], 6),
        "untrained": round(expected["untrained_auc"], 6),
        "relative_difference": float(f"{abs(found['auc'] / expected['auc'] - 1):.1e}"),
        "samples": num_samples,
    }
    say(f"auc: {figures}")
    return figures


def bytes_a_row(folder: Path) -> dict[str, Any]:
    """One worker and one server; the loopback's bytes also hold the MLPs, which do not depend on the rows."""
    dim, steps, rows_of = 16, 6, []
    for rows in (10_000, 1_000_000, 1_000_000_000):
        for batch in (512, 2048):
            tables = tables_of(features=6, rows=rows, dim=dim)
            tables["data"] |= {"max_ids": 2, "num_samples": 1 << 20, "eval_fraction": 0.0}
            tables["train"] = {"steps": steps, "global_batch": batch, "micro_batch": batch}
            tables["sync"] = {"server": {"count": 1}}
            ranks = run_world(served, 2, folder / f"{rows}-{batch}", tables, "", timeout_s=200)
            touched = touched_rows(tables)
            counted = sum(rank["row_bytes"] for rank in ranks)
            one = {"rows": rows, "batch": batch, "touched": touched, "bytes_a_row": round(counted / touched, 2)}
            rows_of.append({**one, "on_the_wire": ranks[0]["loopback_bytes"]})
            say(f"bytes: {rows_of[-1]}")
    ratios = [one["bytes_a_row"] for one in rows_of]
    pairs = zip(rows_of[::2], rows_of[1::2], strict=True)
    slopes = [(b["on_the_wire"] - a["on_the_wire"]) / (b["touched"] - a["touched"]) for a, b in pairs]
    return {
        "cases": rows_of,
        "largest_over_smallest": round(max(ratios) / min(ratios), 4),
        "on_the_wire_a_row": [round(slope, 1) for slope in slopes],
        "values_and_id_of_a_row": 2 * (8 + 4 * dim),
    }


def beside_ddp(folder: Path, rounds: int, torchrec: str) -> dict[str, Any]:
    tables = tables_of(features=6, rows=100_000, dim=16)
    tables["data"] |= {"max_ids": 2, "num_samples": 1 << 20, "eval_fraction": 0.0}
    tables["train"] = {"steps": 24, "global_batch": 1024, "micro_batch": 512}
    found: dict[str, list[dict[str, float]]] = {"served": [], "ddp": []}
    for number in range(rounds):
        with_server = {**tables, "sync": {"server": {"count": 1}}}
        ranks = run_world(served, 3, folder / f"ddp-{number}", with_server, "", timeout_s=300)
        found["served"].append(ranks[0])
        found["ddp"].append(run_world(plain_ddp, 2, tables, timeout_s=300)[0])
        if torchrec:
            found.setdefault("torchrec", []).append(peer(torchrec, tables))
        say(f"ddp: round {number + 1}: " + ", ".join(_told(name, one[-1]) for name, one in found.items()))
    figures: dict[str, Any] = {}
    for name, ones in found.items():
        rate = Spread.of(one["steps_per_s"] for one in ones)
        bytes_a_step = Spread.of(one["bytes_a_step"] for one in ones)
        figures[name] = {"steps_per_s": rate.fields(2), "bytes_a_step": round(bytes_a_step.median)}
    figures["times_fewer_bytes"] = round(figures["ddp"]["bytes_a_step"] / figures["served"]["bytes_a_step"], 1)
    rates = {name: figures[name]["steps_per_s"]["median"] for name in found}
    figures["times_faster"] = round(rates["served"] / rates["ddp"], 2)
    return figures


def _told(name: str, one: dict[str, float]) -> str:
    return f"{name} {one['steps_per_s']:.2f} steps/s, {one['bytes_a_step'] / 1e6:.2f} MB a step"


def peer(python: str, tables: dict[str, Any]) -> dict[str, float]:
    """torchrec's own sharded tables on two ranks."""
    script = Path(__file__).with_name("recommender_peer.py")
    command = [python, str(script), json.dumps(tables)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SetupError(f"torchrec failed: {done.stderr[-2000:]}", "Leave out --torchrec.")
    rate, num_bytes = map(float, done.stdout.split()[-2:])
    return {"steps_per_s": rate, "bytes_a_step": num_bytes}


if __name__ == "__main__":
    begin(main)

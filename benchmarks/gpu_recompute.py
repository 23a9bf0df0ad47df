"""What does recompute cost in speed and save in memory on one GPU, and does the estimate of memory hold?

A Llama is trained in bf16, compiled block by block, with ``train.recompute`` none, selective and full, at the same
micro-batch; one after the other, since each should have the device's memory to itself. Told are tokens per second, MFU
(every query meets every key, and the causal half; what is computed again is never counted), the peak of allocated
memory, and beside it what ``plan`` says a rank of this job holds.

    PYTHONPATH=src python benchmarks/gpu_recompute.py                       1b with 8 x 4096 tokens, 3b with 4 x 4096
    PYTHONPATH=src python benchmarks/gpu_recompute.py --preset 3b --batch 6 one size
    PYTHONPATH=src python benchmarks/gpu_recompute.py --no-compile          eager, as the estimate counts
    python benchmarks/gpu_recompute.py --device cpu --quick                 whether everything runs
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import figures_of, job_for
from gpu_loops import Ours
from lanes import Lanes
from results import conclude, say

from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.facts.shapes.llama import PRESETS, num_params
from closeranks.plan.layouts import layout_cost
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, layout_for
from closeranks.telemetry.device import device_name

MODES = ("none", "selective", "full")
BATCHES = {"1b": 8, "3b": 4}
"""Micro-batches that fit one H200 without recompute."""
JUDGED_STEPS = 3
TOLERANCE = 0.005  # of the loss, in bf16
ESTIMATE_TOLERANCE = 0.15
GIB = 2**30


def main() -> None:
    args = _arguments()
    device = torch.device("cuda", 0) if args.device != "cpu" and torch.cuda.is_available() else torch.device("cpu")
    say(f"{device_name(device)}, torch {torch.__version__}")
    figures = {preset: measure(_for_preset(args, preset), device) for preset in args.preset}
    goal = (
        f"peak memory falls from none to selective to full; the estimate lies within {ESTIMATE_TOLERANCE:.0%} of it; "
        f"equal losses"
    )
    conclude("gpu_recompute", figures, goal, device.type == "cuda" and all(map(judge, figures.values())))


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size = f"{num_params(PRESETS[args.preset]):,} parameters, {args.batch} x {args.seq_len} tokens"
    say(f"Llama {args.preset}: {size}")
    figures: dict[str, Any] = {"batch": args.batch, "seq_len": args.seq_len, "compiled": args.compile, "modes": {}}
    losses: dict[str, list[float]] = {}
    for mode in args.mode:
        with tempfile.TemporaryDirectory(prefix="closeranks-recompute-") as folder:
            job = job_for(args, Path(folder), device.type, recompute=mode)
            figures["modes"][mode], losses[mode] = train(job, mode, args, device)
        say(f"  {mode}: {figures['modes'][mode]}")
    return figures | agreement(losses)


def train(job: Job, mode: str, args: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[float]]:
    """What was measured of one mode; running out of memory is a finding, too."""
    figures: dict[str, Any] = {"estimate": estimate(job)}
    bench = Lanes(device, num_steps=args.steps, tokens_per_step=args.batch * args.seq_len)
    try:
        bench.open({mode: lambda: Ours(job)}, args.warmup)
        bench.take_rounds(args.rounds)
        lane = bench.lanes[mode]
        figures |= figures_of(bench, lane, args, device)
        peak = figures["peak_memory_gib"]
        figures["estimate_over_peak"] = round(figures["estimate"]["total_gib"] / peak, 3) if peak else None
        return figures, lane.loop.losses()
    except torch.OutOfMemoryError as error:
        return figures | {"out_of_memory": str(error).splitlines()[0]}, []
    finally:
        bench.close()
        _forget(device)


def estimate(job: Job) -> dict[str, Any]:
    """What planning says one rank holds at its worst moment, in GiB."""
    rank = layout_cost(describe_job(job), layout_for(job, 1)).fullest
    parts: Sequence[NamedBytes] = rank.activations
    return {
        "total_gib": round(rank.total_bytes / GIB, 2),
        "state_gib": round(rank.state.total / GIB, 2),
        "parts_gib": {part.name: round(part.num_bytes / GIB, 2) for part in parts},
    }


def agreement(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How far the modes' losses lie apart, as a share; recompute changes nothing but when things are computed.

    Judged are the first steps: kernels of another mode round otherwise, and training in bf16 magnifies that.
    """
    curves = [curve[:10] for curve in losses.values() if curve]
    gaps = [(max(step) - min(step)) / min(step) for step in zip(*curves, strict=False)]
    first = gaps[:JUDGED_STEPS]
    return {"loss_gaps": [round(gap, 6) for gap in gaps], "losses_agree": bool(first) and max(first) <= TOLERANCE}


def judge(figures: Mapping[str, Any]) -> bool:
    modes = figures["modes"]
    if set(modes) != set(MODES) or any("out_of_memory" in mode for mode in modes.values()):
        return False
    peaks = [modes[mode]["peak_memory_gib"] for mode in MODES]
    misses = [abs(modes[mode]["estimate_over_peak"] - 1) for mode in MODES]
    falls = peaks == sorted(peaks, reverse=True)
    return falls and max(misses) <= ESTIMATE_TOLERANCE and bool(figures["losses_agree"])


def _forget(device: torch.device) -> None:
    """The next mode starts with an empty device and compiles for itself."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _for_preset(args: argparse.Namespace, preset: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "preset": preset, "batch": args.batch or BATCHES.get(preset, 1)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--preset", choices=list(PRESETS), action="append", help="default: 1b and 3b")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all three")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=0, help="samples a step; default: 8 for 1b, 4 for 3b")
    parser.add_argument("--attention", choices=["auto", "cudnn", "flash", "math"], default="auto")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each mode")
    parser.add_argument("--warmup", type=int, default=4, help="steps before anything is measured")
    parser.add_argument("--compile", action=flag, default=True)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, not compiled")
    args = parser.parse_args()
    args.data = "random"
    if args.quick:
        args.preset, args.seq_len, args.batch, args.compile = ["tiny"], 16, 2, False
        args.steps, args.rounds, args.warmup = 2, 1, 1
    args.preset, args.mode = args.preset or list(BATCHES), args.mode or list(MODES)
    return args


if __name__ == "__main__":
    main()

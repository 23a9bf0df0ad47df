"""Is the planner closer to published step times than llm-analysis, on the rows that both can predict?

llm-analysis (Apache-2.0) is a closed-form calculator: products by FLOPs, and one share of the peak that the user must
name. It is given the best one: for each kind of GPU the share with which its own errors on these very rows are
smallest. Invariant: both predict the same rows, from the same cells; a row that one of them refuses is left out for
both, and counted.

    pip install --no-deps llm-analysis fire termcolor
    PYTHONPATH=src python benchmarks/plan_validate.py
    PYTHONPATH=src python benchmarks/plan_validate.py --runs mine.csv
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from results import begin, conclude, say

from closeranks.core.errors import SetupError
from closeranks.plan.validation.prediction_error import ErrorSummary, RowError, group_rows, summarize
from closeranks.plan.validation.report import JUDGED, validate
from closeranks.plan.validation.run_plan import RunPlan
from closeranks.plan.validation.run_table import load_runs

RUNS = Path(__file__).with_name("plan_runs.csv")
GPUS = {
    "V100-32GB": "v100-sxm-32gb",
    "A100-40GB": "a100-sxm-40gb",
    "A100-80GB": "a100-sxm-80gb",
    "H100-SXM": "h100-sxm-80gb",
}
SHARES = [share / 100 for share in range(20, 91, 5)]
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
INSTALL = "pip install --no-deps llm-analysis fire termcolor"
GOAL = "closer than llm-analysis with the best share of the peak for each kind of GPU, weighed by source"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="table of published runs")
    rows = validate(load_runs(parser.parse_args().runs)).judged(JUDGED)
    theirs, refused = peer_errors(rows)
    lines = {(row.plan.run.number): row for row in theirs}
    ours = [row for row in rows if row.plan.run.number in lines]
    found: dict[str, Any] = {"rows": len(rows), "both": len(ours), "refused": dict(refused)}
    for name, errors in (("closeranks", ours), ("llm-analysis", theirs)):
        found[name] = figures(summarize(errors))
        say(f"{name}: {found[name]}")
    for source, own in group_rows(ours, lambda row: row.source).items():
        peer = summarize([lines[row.plan.run.number] for row in own])
        say(f"  {source}: {len(own)} rows, closeranks {summarize(own).mean:.1%}, llm-analysis {peer.mean:.1%}")
    conclude("plan_validate_peers", found, GOAL, found["closeranks"]["mean"] < found["llm-analysis"]["mean"])


def figures(found: ErrorSummary) -> dict[str, float]:
    return {"mean": round(found.mean, 4), "p90": round(found.p90, 4), "bias": round(found.bias, 4)}


def peer_errors(rows: Sequence[RowError]) -> tuple[list[RowError], Counter[str]]:
    """With the best share of the peak for each kind of GPU."""
    best: list[RowError] = []
    refused: Counter[str] = Counter()
    for device, group in group_rows(rows, lambda row: row.plan.cluster.device.name).items():
        tries = []
        for share in SHARES:
            errors = [(row, predict(row.plan, share)) for row in group]
            tries.append([replace(row, predicted_s=found) for row, found in errors if isinstance(found, float)])
        refused.update(found for _, found in errors if isinstance(found, str))
        if tries[0]:
            best += min(tries, key=lambda one: summarize(one).mean)
        say(f"{device}: {len(tries[0])} of {len(group)} rows")
    return best, refused


def predict(plan: RunPlan, share: float) -> float | str:
    """Seconds of a step by llm-analysis, or why it has none."""
    layout, shape = plan.choice.layout, plan.workload.shape
    if (gpu := GPUS.get(plan.cluster.device.name)) is None:
        return "it has no such GPU"
    if layout.context > 1:
        return "it has no context parallelism"
    try:
        from llm_analysis.analysis import train
    except ImportError as error:
        raise SetupError(
            "llm-analysis is not installed", "pip install --no-deps llm-analysis fire termcolor"
        ) from error
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model.json"
        model.write_text(json.dumps(model_values(shape, plan.workload.seq_len)))
        try:
            found = train(
                model_name=str(model),
                gpu_name=gpu,
                log_level="CRITICAL",
                batch_size_per_gpu=plan.choice.micro_batch,
                global_batch_size=plan.workload.global_batch,
                seq_len=plan.workload.seq_len,
                activation_recomputation=RECOMPUTE[plan.choice.recompute],
                ds_zero=layout.zero,
                dp_size=layout.data,
                tp_size=layout.tensor,
                pp_size=layout.pipeline,
                sp_size=layout.tensor if plan.choice.sequence_parallel else 1,
                flash_attn=plan.choice.fused_attention,
                mlp_gated_linear_units=shape.gated,
                flops_efficiency=share,
                num_gpus_per_node=plan.cluster.devices_per_host,
            )
        except (AssertionError, ValueError, KeyError, ZeroDivisionError) as error:
            return f"it refuses: {str(error).split(',')[0] or type(error).__name__}"
    return float(found["latency_per_iter"])


def model_values(shape: Any, seq_len: int) -> dict[str, Any]:
    return {
        "name": "model",
        "num_layers": shape.num_layers,
        "n_head": shape.num_heads,
        "hidden_dim": shape.dim,
        "vocab_size": shape.vocab_size,
        "max_seq_len": seq_len,
        "num_key_value_heads": shape.num_kv_heads,
        "ffn_embed_dim": shape.ffn_dim,
        "expansion_ratio": shape.ffn_dim / shape.dim,
        "model_type": "llama" if shape.gated else "gpt2",
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    begin(main)

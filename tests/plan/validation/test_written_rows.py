"""Rows of sources that our table does not have, as people write them: each is predicted in the right unit, or refused
with a sentence."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest

from closeranks.plan.validation.prediction_error import row_errors
from closeranks.plan.validation.report import validate
from closeranks.plan.validation.run_plan import RunPlan, plan_of
from closeranks.plan.validation.run_rate import seconds_of_rate
from closeranks.plan.validation.run_table import UnusableRun, load_runs, parse_runs
from tests.cli.calling import call

TABLE = Path(__file__).parents[3] / "benchmarks" / "plan_runs.csv"
LLAMA = {
    "source": "someone/else@1a2b:results.md", "model": "Llama-2-7B", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "32", "ffn_hidden": "11008", "vocab": "32000", "seq_len": "4096", "gpu": "H100", "gpu_count": "8",
    "tp": "1", "pp": "1", "dp": "8", "micro_batch": "1", "global_batch": "64", "recompute": "none", "precision": "bf16",
    "zero_stage": "3",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    cells: dict[str, str]
    measured_s: float = 0.0
    """0 where it is refused."""
    reason: str = ""
    is_now: dict[str, object] = field(default_factory=dict)


ROWS = [
    Written({"gpu": "H100-SXM5-80GB", "precision": "bf16-mixed", "step_time_s": "3.4"}, 3.4, "",
            {"device": "H100-SXM", "precision": "bf16"}),
    Written({"gpu": "A100 80GB SXM", "precision": "BF16", "step_time_s": "8500 ms", "recompute": "False"}, 8.5, "",
            {"device": "A100-80GB", "recompute": "none"}),
    Written({"gpu": "NVIDIA A100-SXM4-40GB", "tokens_per_s_per_gpu": "3,200", "recompute": "True"}, 10.24, "",
            {"device": "A100-40GB", "recompute": "full"}),
    Written({"gpu": "H200 141GB", "precision": "FP8 (hybrid)", "mfu_pct": "30%", "recompute": ""}, 2.544, "",
            {"device": "H200", "precision": "fp8"}),
    Written({"gpu": "B200 192GB", "tflops_per_gpu": "900", "tflops_kind": "model"}, 1.678, "", {"device": "B200"}),
    Written({"gpu": "GB200 NVL72", "gpu_count": "72", "dp": "72", "global_batch": "144", "step_time_s": "1.0"}, 1.0,
            "", {"device": "GB200"}),
    Written({"gpu": "AMD Instinct MI300X", "tflops_per_gpu": "0.4 PFLOP/s", "recompute": "none"}, 3.776, "",
            {"device": "MI300X"}),
    Written({"gpu": "L40S-48GB", "step_time_s": "1 min", "recompute": "yes"}, 60.0, "", {"device": "L40S"}),
    Written({"gpu": "Tesla V100-SXM2-32GB", "precision": "16-mixed", "step_time_s": "30 s", "recompute": "selective"},
            30.0, "", {"device": "V100-32GB", "precision": "fp16", "recompute": "selective"}),
    Written({"gpu": "8x H100", "tflops_per_gpu": "450", "tflops_kind": "hardware", "recompute": "full"}, 4.50, "",
            {"device": "H100-SXM"}),
    Written({"gpu": "H100", "tokens_per_s_per_gpu": "9600 tok/s/gpu", "zero_stage": "", "kv_heads": "n/a"}, 3.41),
    Written({"gpu": "H100-SXM (700 W)", "step_time_s": "3.4", "recompute": "selective (attention)"}, 3.4, "",
            {"device": "H100-SXM", "recompute": "selective"}),
    Written({"gpu": "A100 (PCIe, 40 GB)", "step_time_s": "12", "recompute": "Full, every layer"}, 12.0, "",
            {"device": "A100-PCIe", "recompute": "full"}),
    Written({"gpu": "H100 NVL", "step_time_s": "4"}, 0, "the table of devices has no 'H100 NVL'"),
    Written({"gpu": "H100", "step_time_s": "3400"}, 0, "in another unit"),
    Written({"gpu": "H100", "step_time_s": "0.0034"}, 0, "in another unit"),
    Written({"gpu": "H100", "step_time_s": "3,400"}, 0, "a comma that may be a decimal one"),
    Written({"gpu": "H100", "mfu_pct": "0.43"}, 0, "mfu_pct is no percentage"),
    Written({"gpu": "H100", "step_time_s": "3.4 parsecs"}, 0, "step_time_s is in a unit that is not known"),
    Written({"gpu": "H100", "step_time_s": "3.4", "tokens_per_s_per_gpu": "76000"}, 0, "tokens per second differ"),
    Written({"gpu": "A100", "step_time_s": "9", "precision": "fp8"}, 0, "the A100-80GB has no fp8"),
    Written({"gpu": "H100", "step_time_s": "3.4", "precision": "32-true, tf32"}, 0, "its precision is not modelled"),
    Written({"gpu": "H100", "step_time_s": "3.4", "precision": "mixed"}, 0, "its precision 'mixed' is not known"),
    Written({"gpu": "H100", "step_time_s": "3.4", "recompute": "sometimes"}, 0, "recompute 'sometimes' is not known"),
    Written({"gpu": "H100", "tflops_per_gpu": "450", "recompute": "full"}, 0, "does not say what its TFLOP/s count"),
    Written({"gpu": "H100"}, 0, "neither a step time nor a throughput"),
]  # fmt: skip
COLUMNS = [*LLAMA, "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "tflops_kind", "who ran it"]


def table(rows: list[dict[str, str]]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize("written", ROWS, ids=lambda one: str(list(one.cells.values())))
def test_a_row_is_predicted_in_its_unit_or_refused_with_a_reason(written: Written) -> None:
    found = parse_runs(table([{**LLAMA, **written.cells}]), "mine.csv")
    (run,) = (*found.runs, *found.unusable)
    plan = run.reason if isinstance(run, UnusableRun) else plan_of(run)
    if written.reason:
        assert isinstance(plan, str)
        assert written.reason in plan
        return
    assert isinstance(plan, RunPlan), plan
    assert plan.measured_s == pytest.approx(written.measured_s, rel=0.01)
    is_now = {
        "device": plan.cluster.device.name,
        "precision": plan.choice.precision,
        "recompute": plan.choice.recompute,
    }
    assert is_now | written.is_now == is_now
    (error,), _ = row_errors([plan])
    assert 0 < error.predicted_s < 20 * plan.measured_s


def test_the_command_counts_every_written_row(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(table([{**LLAMA, **one.cells} for one in ROWS]))
    done = call("plan", "validate", "--runs", path, "--rows")
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])["figures"]
    refused = sum(bool(one.reason) for one in ROWS)
    assert (figures["predicted"], figures["not"]) == (len(ROWS) - refused, refused)
    assert "Columns that are not read: who_ran_it." in done.out


def test_a_rate_gives_the_time_that_its_source_publishes_beside_it() -> None:
    """Rows that state both, whose TFLOP/s count model FLOPs with attention in full."""
    runs = [run for run in load_runs(TABLE).runs if run.tflops_kind == "model" and not run.flag]
    plans = [plan for run in runs if run.tokens_per_s_per_gpu and isinstance(plan := plan_of(run), RunPlan)]
    dense = [plan for plan in plans if plan.run.source.startswith(("mosaicml", "huggingface"))]
    assert len(dense) > 100
    for plan in dense:
        found = seconds_of_rate(plan.run, plan.workload, plan.choice, plan.cluster)
        assert found == pytest.approx(plan.measured_s, rel=0.04), plan.run


def test_no_row_of_our_table_is_implausible() -> None:
    report = validate(load_runs(TABLE))
    assert not [one for one in report.unusable if "unit" in one.reason or "differ" in one.reason]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "have no header"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe", "are no text in UTF-8"),
        (b"\x00\x01,\x02\n", "have no column source"),
        (b"source;gpu;gpu_count;seq_len;global_batch;step_time_s\na/b;H100;8;4096;64;3,4\n", "separated by ';'"),
        (b"a/b,H100,8,4096,64,3.4\n", "have no column source"),
        (b"source,gpu,num_gpus,seq_len,global_batch,step_time_s\na,H100,8,4096,64,3\n", "not known: num_gpus"),
        (b"source,gpu,gpu_count,seq_len,global_batch,iteration\na,H100,8,4096,64,3\n", "have no measured time"),
        (b"source,gpu,gpu_count,seq_len,global_batch,step_time_s,gpu\na,H100,8,4096,64,3,A100\n", "column gpu twice"),
        (b"source,gpu,gpu_count,seq_len,global_batch,step_time_s\n", "a header and no rows"),
        (b'source,gpu,gpu_count,seq_len,global_batch,step_time_s\n"' + b"x" * 200_000, "are not a CSV table"),
    ],
)
def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    done = call("plan", "validate", "--runs", path)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_headers_may_be_written_with_capitals_and_spaces() -> None:
    text = "Source,GPU,GPU Count,Seq Len,Global Batch,Step Time s\na/b,H100,8,4096,64,3.5\n"
    (run,) = parse_runs(text, "t").runs
    assert (run.gpu_count, run.step_time_s) == (8, 3.5)

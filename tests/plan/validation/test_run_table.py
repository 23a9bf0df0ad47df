"""Tables of published runs: what is read, what is refused, and on which side of the split a source falls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from closeranks.core.errors import UserError
from closeranks.plan.validation.run_table import load_runs, parse_runs
from closeranks.plan.validation.source_split import side_of, source_name

TABLE = Path(__file__).parents[3] / "benchmarks" / "plan_runs.csv"
HEADER = "source,gpu,gpu_count,seq_len,global_batch,layers,tokens_per_s_per_gpu,step_time_s\n"


def test_every_row_of_our_table_is_read_and_names_its_source() -> None:
    table = load_runs(TABLE)
    assert not table.unusable
    assert len(table.runs) == len(TABLE.read_text().splitlines()) - 1
    assert all(source_name(run.source) for run in table.runs)


def test_blank_is_not_published_and_time_follows_from_tokens() -> None:
    (run,) = parse_runs(HEADER + "a/b:x,A100,8,100,16,,50,\n", "t").runs
    assert run.layers is None
    assert run.measured_s == 100 * 16 / 8 / 50
    (run,) = parse_runs(HEADER + "a/b:x,A100,8,100,16,,50,3.5\n", "t").runs
    assert run.measured_s == 3.5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a,A100,8,100,16,many,50,", "layers is not a whole number"),
        ("a,A100,8,100,16,2.5,50,", "layers is not a whole number"),
        ("a,A100,8,100,16,2,fast,", "tokens_per_s_per_gpu is not a number"),
        ("a,A100,8,100,16,2,nan,", "tokens_per_s_per_gpu is not a number"),
        ("a,A100,-8,100,16,2,5,", "gpu_count is not positive"),
        ("a,A100,,100,16,2,5,", "gpu_count is blank"),
        ("a,,8,100,16,2,5,", "gpu is blank"),
        ("a,A100,8", "the row has more or fewer cells than the header"),
    ],
)
def test_a_row_that_cannot_be_read_is_kept_with_its_reason(row: str, reason: str) -> None:
    table = parse_runs(HEADER + "\n" + row + "\n", "t")
    assert not table.runs
    assert [(one.number, one.reason) for one in table.unusable] == [(3, reason)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "have no header"),
        ("source,gpu\na,b\n", "no column gpu_count, seq_len, global_batch"),
        ("source,gpu,gpu_count,seq_len,global_batch\n", "no measured time"),
    ],
)
def test_what_is_no_such_table_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_runs(text, "mine.csv")


def test_a_file_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_runs(tmp_path / "none.csv")


def test_all_tables_of_one_repository_are_one_source() -> None:
    assert source_name("NVIDIA/NeMo@8e3d65dcfe:docs/a.md") == source_name("NVIDIA/NeMo:docs/b.md") == "NVIDIA/NeMo"
    assert source_name("arXiv 2205.05198 abstract (as stored)") == "arXiv 2205.05198"
    assert source_name("example.org/page (text)") == "example.org/page"


def test_the_split_is_the_one_that_was_committed_before_any_fit() -> None:
    sides = {name: side_of(name) for name in {source_name(run.source) for run in load_runs(TABLE).runs}}
    held_out = {name for name, side in sides.items() if side == "held out"}
    assert held_out == {
        "Lightning-AI/litgpt",
        "VIA-Research/vTrain",
        "arXiv 2205.05198",
        "arXiv 2402.15627",
        "calculon-ai/calculon",
        "cli99/llm-analysis",
        "huggingface/nanotron",
        "mosaicml/llm-foundry",
        "pytorch/torchtitan",
    }
    assert Counter(side_of(str(number)) for number in range(1000))["fit"] == pytest.approx(500, abs=60)

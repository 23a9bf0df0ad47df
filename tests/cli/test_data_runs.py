"""Which samples did a run train on? Killed, resized and resumed, with bad records among them: never another set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import RunEnded, StepDone, Warned
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import closeranks, mark, marked_processes
from tests.cli.fault_hooks import STAND_AT
from tests.cli.fault_jobs import IMPORTABLE, course, hook

STEPS, BATCH = 12, 12
SIZES = (("web", 61), ("code", 47), ("mail", 19))
"""Records of each part: an epoch of the mixture ends within a step."""


def write_records(folder: Path, name: str, count: int, bad: tuple[int, ...] = ()) -> Path:
    path = folder / f"{name}.jsonl"
    rows = [json.dumps({"tokens": [(7 * row + column) % 250 for column in range(17)]}) for row in range(count)]
    for row in bad:
        rows[row] = rows[row][:-3]
    path.write_text("\n".join(rows) + "\n")
    return path


def job(folder: Path, data: str) -> Path:
    path = folder / "job.toml"
    path.write_text(f"""
[run]
folder = "run"
deterministic = true
[model]
name = "llama"
dim = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 64
dropout = 0.1
vocab_size = 256
{data}
[train]
steps = {STEPS}
global_batch = {BATCH}
micro_batch = 1
precision = "float32"
[optim.schedule]
name = "constant"
warmup = 0
[telemetry]
report = false
log_every = 50
[checkpoint]
every = 2
timeout_s = 20.0
""")
    return path


def mixture(folder: Path) -> str:
    tables = ['[data]\nname = "mixture"\nlog_samples = true\nworkers = 1']
    for weight, (name, count) in zip((5, 3, 2), SIZES, strict=True):
        path = write_records(folder, name, count)
        tables.append(f'[data.parts.{name}]\nweight = {weight}.0\n[data.parts.{name}.data]\nname = "records"')
        tables.append(f'path = "{path}"\nseq_len = 16')
    return "\n".join(tables)


def samples_of(run: Path) -> dict[int, list[int]]:
    """Sample ids of each step in the order of positions; a step that was repeated must have taken the same."""
    rows: dict[tuple[int, int], list[int]] = {}
    for path in sorted(run.glob("metrics/samples-*.jsonl")):
        for line in path.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            place = (row["step"], row["micro_batch"])
            assert rows.setdefault(place, row["samples"]) == row["samples"]
    steps: dict[int, list[int]] = {}
    for (step, _), samples in sorted(rows.items()):
        steps.setdefault(step, []).extend(samples)
    return steps


def killed_after(path: Path, num_workers: int, step: int, *settings: str) -> None:
    """Train until a step is done and saved, then SIGKILL the agent, which its workers do not outlive."""
    command = [sys.executable, "-m", "closeranks", "train", str(path), "-n", str(num_workers), hook("StandsStill")]
    env = {**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1", STAND_AT: str(step), (name := mark()): "1"}
    standing = path.parent / "run" / "standing"
    process = subprocess.Popen(
        [*command, *settings], cwd=path.parent, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not standing.exists():
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    standing.unlink()
    while marked_processes(name):
        time.sleep(0.02)


@pytest.mark.timeout(300)  # three runs of up to four workers
@pytest.mark.world
def test_killed_and_resumed_at_other_sizes_a_run_takes_the_same_samples(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    undisturbed = closeranks("train", job(whole, mixture(whole)), "-n", 1, cwd=whole, timeout_s=300)
    assert undisturbed.code == 0, undisturbed.err
    path = job(broken, mixture(broken))
    killed_after(path, 4, 3)
    killed_after(path, 2, 7, "checkpoint.resume=auto")
    done = closeranks("train", path, "-n", 3, "checkpoint.resume=auto", cwd=broken, timeout_s=300)
    assert done.code == 0, done.err
    wanted, found = samples_of(whole / "run"), samples_of(broken / "run")
    assert list(wanted) == list(range(1, STEPS + 1))
    assert found == wanted
    drawn = [sample for step in wanted.values() for sample in step]
    assert len(drawn) == STEPS * BATCH
    firsts = {"web": 0, "code": 61, "mail": 108}
    counts = {name: Counter(s for s in drawn if firsts[name] <= s < firsts[name] + size) for name, size in SIZES}
    for (name, _), weight in zip(SIZES, (0.5, 0.3, 0.2), strict=True):
        assert abs(counts[name].total() - weight * len(drawn)) <= 1
        assert (
            max(counts[name].values()) - min(counts[name].values() if len(counts[name]) == dict(SIZES)[name] else [0])
            <= 1
        )


SKIPPING = (
    '[data]\nname = "records"\npath = "{path}"\nseq_len = 16\nlog_samples = true\non_bad = "skip"\nmax_bad = {most}'
)


@pytest.mark.world
def test_bad_records_are_skipped_alike_whoever_reads_them(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40, bad=(3, 17, 38))
    text = SKIPPING.format(path=path, most=3)
    folders = [tmp_path / name for name in ("whole", "resumed")]
    for folder in folders:
        folder.mkdir()
    first = closeranks("train", job(folders[0], text), "-n", 2, cwd=folders[0], timeout_s=300)
    assert first.code == 0, first.err
    resumed = job(folders[1], text)
    killed_after(resumed, 2, 5)
    second = closeranks("train", resumed, "-n", 2, "checkpoint.resume=auto", cwd=folders[1], timeout_s=300)
    assert second.code == 0, second.err
    assert course(folders[0] / "run") == course(folders[1] / "run")
    events = [event for _, event in read_events(folders[0] / "run" / "metrics" / "rank-00000.jsonl")]
    said = [event.what for event in events if isinstance(event, Warned) and "is skipped" in event.what]
    assert len(said) == 3  # once each, though there are three epochs and more
    assert all("records.jsonl" in what and "byte" in what for what in said)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert sum(step.num_bad for step in steps) == sum(
        sample in (3, 17, 38) for step in samples_of(folders[0] / "run").values() for sample in step
    )
    assert sum(step.weight for step in steps) == 16 * (STEPS * BATCH - sum(step.num_bad for step in steps))


@pytest.mark.world
def test_too_many_bad_records_end_the_run_on_every_rank(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40, bad=(3, 17, 38))
    done = closeranks("train", job(tmp_path, SKIPPING.format(path=path, most=2)), "-n", 2, cwd=tmp_path, timeout_s=300)
    assert done.code == 2
    assert "data.max_bad = 2" in done.err
    assert done.left_behind == []


def test_a_bad_record_stops_the_run_and_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40, bad=(17,))
    text = f'[data]\nname = "records"\npath = "{path}"\nseq_len = 16'
    done = closeranks("train", job(tmp_path, text), "-n", 1, cwd=tmp_path, timeout_s=300)
    assert done.code == 2
    for word in ("sample 17", "records.jsonl", "byte", "data.on_bad = 'skip'"):
        assert word in done.err
    (ended,) = (
        event
        for _, event in read_events(tmp_path / "run" / "metrics" / "rank-00000.jsonl")
        if isinstance(event, RunEnded)
    )
    assert ended.reason == "failed"


@pytest.mark.world
def test_whole_steps_of_bad_records_are_passed_over(tmp_path: Path) -> None:
    """More of them in a row than steps that may fail: they did not fail, they were left out."""
    bad = tuple(range(BATCH, 6 * BATCH))
    path = write_records(tmp_path, "records", 10 * BATCH, bad=bad)
    text = SKIPPING.format(path=path, most=len(bad)) + '\nshuffle = "none"\neval_fraction = 0.1'
    done = closeranks("train", job(tmp_path, text), "-n", 2, "train.steps=8", cwd=tmp_path, timeout_s=300)
    assert done.code == 0, done.err
    events = [event for _, event in read_events(tmp_path / "run" / "metrics" / "rank-00000.jsonl")]
    taken = [event.taken for event in events if isinstance(event, StepDone)]
    assert taken == [not 2 <= step <= 6 for step in range(1, 9)]


@pytest.mark.world
@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("pipeline=2", marks=pytest.mark.slow)])
def test_ranks_that_work_on_the_same_samples_skip_the_same(tmp_path: Path, layout: str) -> None:
    path = write_records(tmp_path, "records", 40, bad=(3, 17))
    text = SKIPPING.format(path=path, most=2)
    split = [f"layout={layout}", "train.steps=4", "checkpoint.save=false"]
    alone = closeranks("train", job(tmp_path, text), "-n", 1, *split[1:], cwd=tmp_path, timeout_s=300)
    assert alone.code == 0, alone.err
    both = closeranks("train", job(tmp_path, text), "-n", 2, *split, "run.folder=both", cwd=tmp_path, timeout_s=300)
    assert both.code == 0, both.err
    found = [
        [event for _, event in read_events(tmp_path / run / "metrics" / "rank-00000.jsonl")] for run in ("run", "both")
    ]
    one, two = ([event for event in events if isinstance(event, StepDone)] for events in found)
    assert [event.weight for event in one] == [event.weight for event in two]
    assert [event.loss for event in two] == pytest.approx([event.loss for event in one], abs=1e-5)


@pytest.mark.world
def test_ranks_of_a_replica_that_read_different_data_are_told(tmp_path: Path) -> None:
    """A copy of the data that is damaged on one host alone: nobody waits for ever."""
    path = write_records(tmp_path, "records", 40)
    text = SKIPPING.format(path=path, most=5) + '\nchecks = {hooks = ["tests.cli.fault_hooks:odd_on_rank_1"]}'
    split = ["layout=tensor=2", "checkpoint.save=false"]
    done = closeranks("train", job(tmp_path, text), "-n", 2, *split, cwd=tmp_path, timeout_s=300, env=IMPORTABLE)
    assert done.code == 2, done.err
    assert "can be read by some ranks of a replica and not by others" in done.err


@pytest.mark.slow
@pytest.mark.world
def test_bad_records_of_the_evaluation_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40, bad=(36, 39))
    text = SKIPPING.format(path=path, most=2) + "\neval_fraction = 0.2"
    done = closeranks("train", job(tmp_path, text), "-n", 2, "train.steps=2", cwd=tmp_path, timeout_s=300)
    assert done.code == 0, done.err
    assert "2 bad samples left out" in done.out + done.err
    few = closeranks("train", job(tmp_path, text), "-n", 2, "data.max_bad=1", cwd=tmp_path, timeout_s=300)
    assert few.code == 2
    assert "bad samples in the evaluation data" in few.err


def test_a_reading_process_that_is_killed_is_no_mistake_of_the_users(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40)
    text = f'[data]\nname = "records"\npath = "{path}"\nseq_len = 16\nworkers = 2'
    text += '\nchecks = {hooks = ["tests.cli.fault_hooks:killed_in_reading"]}'
    done = closeranks("train", job(tmp_path, text), "-n", 1, cwd=tmp_path, timeout_s=300, env=IMPORTABLE)
    assert done.code == 1, done.err
    assert "of 2 that read records 'records.jsonl'" in done.err
    assert "was killed by SIGKILL" in done.err
    assert done.left_behind == []


@pytest.mark.world
def test_bad_evaluation_data_costs_no_state(tmp_path: Path) -> None:
    path = write_records(tmp_path, "records", 40, bad=(39,))
    text = f'[data]\nname = "records"\npath = "{path}"\nseq_len = 16\neval_fraction = 0.2'
    done = closeranks("train", job(tmp_path, text), "-n", 2, "train.steps=3", cwd=tmp_path, timeout_s=300)
    assert done.code == 2
    assert "records.jsonl" in done.err
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()

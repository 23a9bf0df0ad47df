"""``closeranks doctor`` on folders as they occur: sound, truncated, fuzzed, of two runs, and not a run at all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.core.events import RunStarted, StepDone, StepPhases, encode
from tests.cli.calling import call

NUM_STEPS = 30


def write_run(folder: Path, data_s: float, workers: int = 0) -> Path:
    """A run folder as a run leaves it; ``data_s``: what each step waits for data."""
    (folder / "metrics").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": {"workers": workers}}))
    for rank in range(2):
        lines = [{"at": 0.0, "rank": rank, **encode(RunStarted(rank=rank, world_size=2, device="Test CPU"))}]
        for step in range(1, NUM_STEPS + 1):
            done = StepDone(step=step, loss=2.0, items=64, seconds=0.1 + data_s, data_read_s=0.15)
            phases = StepPhases(step, 0.1 + data_s, {"data": data_s, "forward": 0.04, "backward": 0.06})
            lines += [{"at": float(step), "rank": rank, **encode(one)} for one in (done, phases)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / "metrics" / f"rank-{rank:05d}.jsonl").write_text(text)
    return folder


def test_a_finding_says_how_it_shows_what_to_change_and_what_that_gains(tmp_path: Path) -> None:
    done = call("doctor", write_run(tmp_path / "slow", 0.1), cwd=tmp_path)
    assert done.code == 0
    for words in (
        "29 steps of 200 ms on 2 workers",
        "[input-bound]",
        "data.workers=2    (now 0)",
        "2.00 times as fast",
    ):
        assert words in done.out


def test_a_healthy_run_is_said_to_be_healthy(tmp_path: Path) -> None:
    done = call("doctor", write_run(tmp_path / "fine", 0.001), cwd=tmp_path)
    assert "Nothing found that is worth changing" in done.out
    assert "backward 59%" in done.out


def test_two_runs_say_whether_the_advice_helped(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", 0.1), write_run(tmp_path / "b", 0.0, workers=2)
    done = call("doctor", before, after, cwd=tmp_path)
    assert "is 2.00 times as fast as" in done.out
    assert "data.workers: 0 -> 2" in done.out
    assert "gone        input-bound (advice followed)" in done.out


def test_json_has_the_same_findings(tmp_path: Path) -> None:
    done = call("doctor", write_run(tmp_path / "slow", 0.1), "--json", cwd=tmp_path)
    found = json.loads(done.out)["findings"]
    assert [(one["cause"], one["changes"][0]["key"]) for one in found] == [("input-bound", "data.workers")]


CHANNEL = "n1:41:57 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {}\n"


def test_the_transports_in_the_logs_of_workers_are_shown(tmp_path: Path) -> None:
    """NCCL prints them when a run starts: what follows the beginning of a long log is not read."""
    folder, much = write_run(tmp_path / "run", 0.0), "loss 1.0\n" * (1 << 19)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-00000.log").write_text(CHANNEL.format("P2P/CUMEM") + much + CHANNEL.format("SHM/direct"))
    (folder / "logs" / "rank-00001.log").write_bytes(b"\xff\x00NCCL INFO Channel\n" * 9)
    (folder / "logs" / "rank-00002.log").mkdir()
    done = call("doctor", folder, cwd=tmp_path)
    assert "transport within a host P2P/CUMEM, 1 pair\n" in done.out
    found = json.loads(call("doctor", folder, "--json", cwd=tmp_path).out)["nccl"]
    assert [one["via"] for one in found["transports"]] == ["P2P/CUMEM"]


@pytest.mark.parametrize("seed", range(4))
def test_truncated_and_fuzzed_files_cost_what_they_held(tmp_path: Path, seed: int) -> None:
    folder, rng = write_run(tmp_path / "run", 0.1), random.Random(seed)
    for path in (folder / "metrics").iterdir():
        content = bytearray(path.read_bytes()[: rng.randrange(2000, 6000)])
        for _ in range(20):
            content[rng.randrange(1000, len(content))] = rng.randrange(256)
        path.write_bytes(content)
    (folder / "config.json").write_bytes(b"{\xff")
    for verb in ("doctor", "report", "status"):
        done = call(verb, folder, cwd=tmp_path)
        assert done.code == 0
        assert "Traceback" not in done.out + done.err
        said = (folder / "report.md").read_text() if verb == "report" else done.out
        assert "of rank 0's metrics are damaged and left out" in said
    assert "config.json is missing or damaged" in call("doctor", folder, cwd=tmp_path).out


Damage = Callable[[Path], object]
LOST: dict[str, tuple[Damage, str]] = {
    "cut off": (
        lambda folder: os.truncate(folder / "metrics" / "rank-00001.jsonl", 3000),
        "rank 1 lacks the record of where its time went",
    ),
    "no rank 0": (
        lambda folder: (folder / "metrics" / "rank-00000.jsonl").unlink(),
        "the metrics of rank 0 are missing",
    ),
    "no settings": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "agent": (
        lambda folder: (folder / "metrics" / "agent.jsonl").write_bytes(b"\xff\n" * 3),
        "3 lines of the agent's events are damaged",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_missing_is_said(tmp_path: Path, name: str) -> None:
    folder, (damage, said) = write_run(tmp_path / "run", 0.1), LOST[name]
    assert "Note:" not in call("doctor", folder, cwd=tmp_path).out
    damage(folder)
    (folder / "job.toml").touch()
    done = call("doctor", folder, cwd=tmp_path)
    assert done.code == 0
    assert f"Note: {said}" in done.out


def test_a_status_that_is_damaged_is_taken_from_the_metrics_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 0.1)
    assert "Note:" not in call("status", folder, cwd=tmp_path).out
    (folder / "status.json").write_text('{"at":')
    done = call("status", folder, cwd=tmp_path)
    assert f"step {NUM_STEPS}" in done.out
    assert "Note: status.json cannot be read: this is from the metrics." in done.out


def test_a_run_that_recorded_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rank-00000.jsonl").write_text("")
    done = call("doctor", tmp_path, cwd=tmp_path)
    assert done.code == 0
    assert "no step was recorded" in done.out
    assert "Not known: no rank recorded" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["run", "--rule", "slow"], "'slow' does not name a rule"),
        (["run", "--rule", "os:sep"], "os:sep is not a function"),
        (["run", "--rule", "no_such_module:find"], "there is no module 'no_such_module'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_run(tmp_path / "run", 0.0)
    done = call("doctor", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) <= 2


def test_it_starts_without_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.1)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from closeranks.cli.main import build_app\n"
        f"build_app()(['doctor', {str(run)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "input-bound" in done.stdout

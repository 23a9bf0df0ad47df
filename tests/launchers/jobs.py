"""A job small enough to be launched many times, and what its run folder tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from closeranks.core.events import Event, RunEnded, StepDone
from closeranks.telemetry.run_log.recorder import read_events

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny.toml")
TRAIN = ("-m", "closeranks", "train", TINY)
SMALL = (
    "model.num_layers=2",
    "model.dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=64",
    "data.seq_len=16",
    "data.max_bytes=20000",
    "train.eval_every=0",
    "train.eval_samples=6",
    # The same rate at every step, so that a run's losses do not depend on how long it was meant to be.
    "optim.schedule.name=constant",
    "optim.schedule.warmup=0",
    "telemetry.log_every=5",
)


def environment(**more: str) -> dict[str, str]:
    """One thread per rank, and nothing that the shell says about another world."""
    foreign = re.compile(r"SLURM_|MASTER_|RANK$|WORLD_SIZE$|GLOO_")
    kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def trained(folder: Path, steps: int) -> list[float]:
    """The losses of the run that all others are compared with: two workers of our own agent."""
    overrides = [*SMALL, f"train.steps={steps}", "telemetry.report=false", f"run.folder={folder}"]
    command = [sys.executable, *TRAIN, "-n", "2", *overrides]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return losses(folder, 0)


def events(folder: Path, rank: int) -> list[Event]:
    return [event for _, event in read_events(folder / "metrics" / f"rank-{rank:05d}.jsonl") if event is not None]


def losses(folder: Path, rank: int) -> list[float]:
    return [event.loss for event in events(folder, rank) if isinstance(event, StepDone)]


def endings(folder: Path, num_ranks: int = 2) -> list[tuple[int, str]]:
    """At which step and why each rank's last run ended."""
    ends = [[event for event in events(folder, rank) if isinstance(event, RunEnded)][-1] for rank in range(num_ranks)]
    return [(end.step, end.reason) for end in ends]


def said(text: str) -> list[str]:
    """Every sentence of ours to the person; a mistake must be told once."""
    return re.findall(r"^closeranks: .*$", text, re.MULTILINE)


def assert_complete(folder: Path, expected: Sequence[float]) -> None:
    """Everything a run leaves, and the very losses of the run it is compared with, on both ranks."""
    names = ["checkpoints/latest", "curve.png", "report.md", "job.toml", "config.json"]
    assert [name for name in names if not (folder / name).is_file()] == []
    assert "did not end cleanly" not in (folder / "report.md").read_text()
    assert [losses(folder, rank) for rank in (0, 1)] == [list(expected)] * 2
    assert endings(folder) == [(len(expected), "finished")] * 2

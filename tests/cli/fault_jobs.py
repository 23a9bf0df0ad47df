"""A small job with all that makes a resume hard (dropout, accumulation, uneven batches), and what it left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.events import Saved, SaveFailed, StepDone
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import IMPORTABLE, Done, closeranks
from tests.run.small import of_kind

STEPS = 12
TEXT = f"""
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
[data]
name = "text"
seq_len = 16
max_bytes = 20000
[train]
steps = {STEPS}
global_batch = 7
micro_batch = 1
eval_samples = 1
precision = "float32"
[optim]
lr = 1e-2
[optim.schedule]
name = "constant"
warmup = 0
[telemetry]
report = false
log_every = 50
[checkpoint]
every = 2
keep_last = 2
timeout_s = 5.0
"""
ALONE = "elastic.enabled=false"
"""A worker that falls ends the run: what is saved is all there is to go on from."""


def hook(name: str) -> str:
    return f'run.hooks=["tests.cli.fault_hooks:{name}"]'


def write_job(folder: Path) -> str:
    path = folder / "job.toml"
    path.write_text(TEXT)
    return str(path)


def go(
    folder: Path, *settings: object, num_workers: int = 2, env: dict[str, str] | None = None, timeout_s: float = 300.0
) -> Done:
    """``closeranks train`` of the job in a folder."""
    job = write_job(folder)
    env = {**IMPORTABLE, **(env or {})}
    return closeranks("train", job, "-n", num_workers, *settings, cwd=folder, env=env, timeout_s=timeout_s)


@dataclass(frozen=True)
class Course:
    """What a run came to: every loss, and every tensor of its last checkpoint."""

    losses: frozenset[tuple[int, float]]
    digests: Any


def course(run: Path, place: str = "") -> Course:
    """A step that was taken twice, before and after a resume, has one loss or two."""
    lines = read_events(run / "metrics" / "rank-00000.jsonl")
    losses = frozenset((event.step, event.loss) for _, event in lines if isinstance(event, StepDone))
    return Course(losses, open_newest(place or str(run)).manifest.digests())


def saved(run: Path, tier: str = "primary") -> list[int]:
    return [event.step for event in of_kind(run, Saved) if event.tier == tier]


def failed(run: Path, tier: str = "primary", rank: int = 0) -> list[int]:
    return [event.step for event in of_kind(run, SaveFailed, rank) if event.tier == tier]

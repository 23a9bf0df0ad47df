"""The job that hostile cases are done to: a model of a few kilobytes with AdamW, dropout and accumulation, and the hook
that lets a case hold a step or order user code to misbehave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.hostile.cases import STEPS

TEXT = f"""
[run]
folder = "disk/run"
deterministic = true
seed = 7
hooks = ["tests.hostile.hooks:Obedient"]
[model]
name = "llama"
dim = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
ffn_dim = 32
dropout = 0.1
[data]
name = "text"
seq_len = 16
max_bytes = 20000
[train]
steps = {STEPS}
global_batch = 6
micro_batch = 1
eval_samples = 2
precision = "float32"
[optim]
lr = 1e-2
[telemetry]
report = false
log_every = 5
[checkpoint]
every = 5
timeout_s = 20.0
[elastic]
snapshot_every = 1
hang_floor_s = 30
stragglers = "off"
# As in a drill: a campaign is not to be taken for a job whose own code fails at a step.
max_repeats = 20
max_faults = 100
"""
ORDERS, PACE = "HOSTILE_ORDERS", "HOSTILE_PACE_S"
"""Environment variables of the hook: the folder of orders, and how long it waits after each step."""
FLOODS: dict[str, bytes] = {
    "progress": b"\r 57% [======>      ] 12.3 it/s loss 1.234",
    "line": b"x",
    "binary": bytes(range(256)),
    "ansi": b"\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[1A\x1b[K",
    "newlines": b"\n",
    "nul": b"\0",
}
"""What user code prints over and over."""


@dataclass(frozen=True)
class Shape:
    layout: str
    num_workers: int


SHAPES = {"pair": Shape("data=2", 2), "zero3": Shape("data=3 zero=3", 3)}


def write_job(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(TEXT)
    return path

"""A small job that is compared, and comparisons of it as text."""

from __future__ import annotations

from pathlib import Path

JOB = """
[model]
name = "llama"
dim = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 64
vocab_size = 4096
[data]
name = "text"
seq_len = 16
max_bytes = 20000
[train]
steps = 12
global_batch = 8
micro_batch = 4
eval_samples = 4
[optim]
lr = 1e-2
[telemetry]
log_every = 100
"""
HEAD = """
job = "job.toml"
workers = 2
seeds = [0, 1]
folder = "out"
"""
TWO = """
[[setting]]
name = "replicas"
[[setting]]
name = "zero 1"
set.layout.zero = 1
"""
KILLED = """
[[condition]]
name = "killed"
faults = "kill(rank=-1, step=5)"
"""


def write(folder: Path, text: str = HEAD + TWO, job: str = JOB) -> Path:
    (folder / "job.toml").write_text(job)
    path = folder / "compare.toml"
    path.write_text(text)
    return path

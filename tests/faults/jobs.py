"""The job that faults strike: small, and with all that makes it hard to go on as if nothing had happened (AdamW,
dropout, accumulation, clipping), under every way to spread it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEPS = 16
TEXT = f"""
[run]
folder = "run"
deterministic = true
seed = 7
hooks = ["tests.faults.misdeeds:Misdeeds"]
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
log_samples = true
[train]
steps = {STEPS}
global_batch = 16
micro_batch = 2
eval_samples = 2
precision = "float32"
[optim]
name = "adamw"
lr = 1e-2
clip = 1.0
[optim.schedule]
name = "constant"
warmup = 0
[telemetry]
report = false
log_every = 100
[checkpoint]
every = 0
[elastic]
snapshot_every = 1
hang_floor_s = 30
stragglers = "off"
"""


@dataclass(frozen=True)
class Shape:
    """A way to spread the job, and for how many workers."""

    layout: str
    num_workers: int
    settings: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """As in a table."""
        return f"{self.layout}, 2 servers" if self.settings else self.layout


SERVERS = "servers"
SHAPES = {
    "ddp": Shape("data=4", 4),
    "zero3": Shape("data=3 zero=3", 3),
    "tensor": Shape("data=2 tensor=2", 4),
    "pipeline": Shape("data=2 pipeline=2", 4),
    SERVERS: Shape("data=4", 4, ("sync.server.count=2",)),
}
"""Two micro-batches or more for every data rank: eight are shared out, to three ranks unevenly. Of four
ranks with two servers, ranks 2 and 3 are the servers."""


def write_job(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(TEXT)
    return path

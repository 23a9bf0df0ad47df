"""What do all contenders train? The same model from the same weights, on the same batches, at the same rates.

Invariant: everything here is a pure function of the workload, so that contenders which agree on it can differ in their
own cost alone; that they do train the same is checked on their losses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

from closeranks.core.protocols import DataSource
from closeranks.data.sampling.order import BatchSchedule
from closeranks.data.sources.open import open_source
from closeranks.models.build import spec_for
from closeranks.optim.lr_schedule import lr_factor
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.job.job import Job, load_job

CLIP = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Workload:
    """A Llama on text, one micro-batch of ``batch`` samples per rank and step."""

    preset: str
    seq_len: int
    batch: int
    num_ranks: int
    num_steps: int
    folder: Path
    num_layers: int | None = None
    """Fewer blocks than the preset's, where a step is to be shorter than it allows."""
    seed: int = 7
    lr: float = 1e-3

    @cached_property
    def job(self) -> Job:
        """The workload as a user of closeranks writes it; the other contenders take their numbers from it too."""
        tables: dict[str, Any] = {
            "run": {"folder": str(self.folder / "closeranks"), "seed": self.seed, "device": "cpu"},
            "model": {"name": "llama", "preset": self.preset, "num_layers": self.num_layers},
            "data": {"name": "text", "path": "stdlib", "seq_len": self.seq_len},
            "train": {
                "steps": self.num_steps,
                "global_batch": self.batch * self.num_ranks,
                "micro_batch": self.batch,
            },
            "optim": {"lr": self.lr, "clip": CLIP, "weight_decay": WEIGHT_DECAY, "betas": BETAS},
        }
        return load_job(None, extra=tables).value

    @cached_property
    def source(self) -> DataSource:
        return open_source(self.job.data, "train", self.seed)

    @property
    def num_targets(self) -> int:
        return self.batch * self.seq_len

    def model(self) -> nn.Module:
        spec = spec_for(self.job.model, seq_len=self.seq_len)
        device = torch.device("cpu")
        return materialize(spec, seed=self.seed, device=device, dtype=torch.float32, broadcast=lambda tensor: tensor)

    def rate(self, step: int) -> float:
        """Warm-up, then a cosine: what every contender multiplies its learning rate with."""
        return lr_factor(self.job.optim.schedule, step, self.num_steps)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Decay on matrices only."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=BETAS, fused=True)

    def indices(self, rank: int) -> list[Any]:
        """The samples of every step of a rank, in the order in which closeranks reads them."""
        total = len(self.source)
        schedule = BatchSchedule.for_steps(total, self.batch * self.num_ranks, self.batch, self.num_steps)
        shares = (schedule.assigned(step, rank, self.num_ranks) for step in range(self.num_steps))
        return [share[0].indices(total, self.seed) for share in shares]


class Samples(Dataset[Tensor]):
    """The text for torch's loader: a list of samples in, a whole batch out, so that nothing is collated."""

    def __init__(self, source: DataSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: Any) -> Tensor:
        return self._source.read(indices)["tokens"]


class InOrder(BatchSampler):
    """Batches that are known beforehand, as lists: what torch's samplers yield and Accelerate counts on."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(range(0), len(batches[0]), drop_last=False)
        self._batches = [batch.tolist() for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def loader(workload: Workload, batches: list[Any]) -> DataLoader[Tensor]:
    """torch's loader over text in memory: reading in the step is faster here than any worker process."""
    return DataLoader(Samples(workload.source), sampler=InOrder(batches), batch_size=None)


class StepLog:
    """One JSON line a step, to a file of rank 0: what closeranks records too."""

    def __init__(self, path: Path, tokens_per_step: int, *, writes: bool) -> None:
        self._file = path.open("w", buffering=1) if writes else None
        self._tokens = tokens_per_step
        self._marked_at = time.perf_counter()

    def write(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        now = time.perf_counter()
        speed, self._marked_at = self._tokens / (now - self._marked_at), now
        if self._file is not None:
            line = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_s": speed}
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def logged_losses(path: Path) -> list[float]:
    """The loss of every step in a log, ours or a ``StepLog``; lines without one are skipped."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [float(line["loss"]) for line in lines if "loss" in line and line.get("event", "step") == "step"]

"""What do all contenders of a layout train? The same Llama from the same weights, on the same micro-batches.

Invariant: a step is the same samples in every layout; only who computes what of it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from workload import BETAS, CLIP, WEIGHT_DECAY, StepLog, Workload

from closeranks.data.sampling.order import BatchSchedule
from closeranks.run.job.job import Job, load_job


@dataclass(frozen=True)
class LayoutWork(Workload):
    """A workload of ``num_micro`` micro-batches of ``batch`` samples for each of ``num_ranks`` data ranks."""

    num_micro: int = 1
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a contender of ours adds to the job: its layout, mostly."""
    name: str = "closeranks"

    @cached_property
    def job(self) -> Job:
        tables: dict[str, Any] = {
            "run": {"folder": str(self.folder / self.name), "seed": self.seed, "device": "cpu"},
            "model": {"name": "llama", "preset": self.preset, "num_layers": self.num_layers},
            "data": {"name": "text", "path": "stdlib", "seq_len": self.seq_len},
            "train": {"steps": self.num_steps, "global_batch": self.global_batch, "micro_batch": self.batch},
            "optim": {"lr": self.lr, "clip": CLIP, "weight_decay": WEIGHT_DECAY, "betas": BETAS},
            "checkpoint": {"save": False},
        }
        return load_job(None, extra={**tables, **self.tables}).value

    @property
    def global_batch(self) -> int:
        return self.batch * self.num_micro * self.num_ranks

    @property
    def num_targets(self) -> int:
        """Of a data rank's whole step."""
        return self.batch * self.num_micro * self.seq_len

    def micro_batches(self, data_rank: int) -> list[list[Any]]:
        """The samples of every step of a data rank, micro-batch by micro-batch."""
        total = len(self.source)
        schedule = BatchSchedule.for_steps(total, self.global_batch, self.batch, self.num_steps)
        shares = (schedule.assigned(step, data_rank, self.num_ranks) for step in range(self.num_steps))
        return [[micro.indices(total, self.seed) for micro in share] for share in shares]

    def read(self, indices: Any) -> tuple[Tensor, Tensor]:
        """What the model reads, and what it should say."""
        tokens = self.source.read(indices)["tokens"].long()
        return tokens[:, :-1], tokens[:, 1:]


class Loop:
    """What loops written by hand share: the micro-batches, the rate and the log. ``take_step`` is the loop's own."""

    def __init__(self, work: LayoutWork, data_rank: int) -> None:
        self.work = work
        self.micro_batches = work.micro_batches(data_rank)
        self.num_done = 0
        self.log_path = work.folder / f"{work.name}.jsonl"
        self._log = StepLog(self.log_path, work.num_targets * work.num_ranks, writes=dist.get_rank() == 0)

    def take_steps(self, num_steps: int) -> None:
        for step in range(self.num_done, self.num_done + num_steps):
            rate = self.work.lr * self.work.rate(step)
            loss, norm = self.take_step(self.micro_batches[step], rate)
            self._log.write(step + 1, loss, norm, rate)
        self.num_done += num_steps

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        """Train on them; the mean loss of all ranks and the gradient norm before clipping."""
        raise NotImplementedError

    def close(self) -> None:
        self._log.close()

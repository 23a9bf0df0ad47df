"""How does each way of training take a step? A hand-written DDP loop, and closeranks itself.

A contender is built on every rank, then takes its turns. Every one logs the loss of all ranks, the gradient norm, the
rate and the speed of every step. Invariant: a turn does what a user's loop does and nothing for the benchmark's sake.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from workload import CLIP, StepLog, Workload

from closeranks.run.session import Session

TUNED: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
"""DDP without its two costs that this model does not need; the peers that build on DDP get them as well."""


class Contender(Protocol):
    """Call sequence, on every rank alike: ``take_steps`` once for each turn, then ``close``."""

    log_path: Path
    """Where rank 0 finds the losses after ``close``."""

    def take_steps(self, num_steps: int) -> None: ...

    def close(self) -> None: ...


class Ddp:
    """What one writes by hand for speed: tensors indexed in memory, fused AdamW, no abstraction."""

    def __init__(self, workload: Workload, name: str, **options: Any) -> None:
        rank = dist.get_rank()
        self._workload = workload
        self._indices = workload.indices(rank)
        self._model = DistributedDataParallel(workload.model(), **options)
        self._parameters = list(self._model.parameters())
        self._optimizer = workload.optimizer(self._model)
        self._num_done = 0
        self.log_path = workload.folder / f"{name}.jsonl"
        self._log = StepLog(self.log_path, workload.num_targets * workload.num_ranks, writes=rank == 0)

    def take_steps(self, num_steps: int) -> None:
        for step in range(self._num_done, self._num_done + num_steps):
            self._take_step(step)
        self._num_done += num_steps

    def _take_step(self, step: int) -> None:
        workload = self._workload
        tokens = workload.source.read(self._indices[step])["tokens"].long()
        loss = self._model(tokens[:, :-1], tokens[:, 1:]) / workload.num_targets
        loss.backward()
        norm = clip_grad_norm_(self._parameters, CLIP)
        rate = workload.lr * workload.rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        self._log.write(step + 1, total.item() / workload.num_ranks, norm.item(), rate)

    def close(self) -> None:
        self._log.close()


class Closeranks:
    """A session as ``closeranks train`` opens it: its loader, its recorder, its link to the agent."""

    def __init__(self, workload: Workload) -> None:
        self._session = Session.from_job(workload.job)
        self._steps = iter(self._session)
        self._has_begun = False
        self.log_path = self._session.folder / "metrics" / "rank-00000.jsonl"

    def take_steps(self, num_steps: int) -> None:
        """Each step is committed when the next one is asked for, so a turn commits the last one of the turn before."""
        self._take_collector()
        session = self._session
        for _ in range(num_steps):
            step = next(self._steps)
            for batch in step:
                step.backward(session.loss(batch))
        self._give_collector_back()

    def _take_collector(self) -> None:
        """A session holds the garbage collector; between its turns the others have it as Python runs it."""
        if self._has_begun:
            gc.freeze()
            gc.disable()
        self._has_begun = True

    @staticmethod
    def _give_collector_back() -> None:
        gc.unfreeze()
        gc.enable()

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]


def hand_written(workload: Workload) -> dict[str, Contender]:
    return {"ddp": Ddp(workload, "ddp"), "ddp_tuned": Ddp(workload, "ddp_tuned", **TUNED)}

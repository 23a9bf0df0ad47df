"""Who trains on the one GPU? A session of closeranks, and a plain compiled loop of the same module.

Invariant: both train the same weights on the same batches at the same rates; their losses tell whether it is so.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from closeranks.data.sources.open import open_source
from closeranks.models.build import spec_for
from closeranks.models.llama.linear import Linear
from closeranks.optim.lr_schedule import lr_factor
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.builder.context import batch_schedule
from closeranks.run.job.job import Job
from closeranks.run.session import Session
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker


class Loop(Protocol):
    """Call sequence: ``take_steps`` once for each turn, ``losses``, ``close``."""

    def take_steps(self, num_steps: int) -> None: ...

    def losses(self) -> list[float]: ...

    def close(self) -> None: ...


class Ours:
    """A session as a job opens it: loader, recorder and all."""

    def __init__(self, job: Job) -> None:
        configure_worker(agent_client=StandaloneClient())  # the benchmark speaks for itself
        self._session = Session.from_job(job)
        self._steps = iter(self._session)

    def take_steps(self, num_steps: int) -> None:
        """Each step is committed when the next one is asked for, so a turn commits the last one of the turn before."""
        for _ in range(num_steps):
            step = next(self._steps)
            for batch in step:
                step.backward(self._session.loss(batch))

    def losses(self) -> list[float]:
        lines = (self._session.folder / "metrics" / "rank-00000.jsonl").read_text().splitlines()
        return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]
        del self._session, self._steps


class Plain:
    """A loop written by hand for speed: nothing is read from the device, batches are pinned and copied ahead."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device
        spec = spec_for(job.model, seq_len=job.data.seq_len)
        self._model = materialize(spec, seed=job.run.seed, device=device, dtype=torch.float32, broadcast=_same)
        for layer in self._model.modules():
            if type(layer) is Linear:
                layer.__class__ = nn.Linear  # what a loop written by hand has: autocast's own product
        for unit in spec.compile_units if job.train.compile else ():
            self._model.get_submodule(unit).compile()
        self._optimizer = torch.optim.AdamW(
            _groups(self._model, job.optim.weight_decay), betas=job.optim.betas, fused=True
        )
        self._batches = _Batches(job, device)
        self._losses: list[Tensor] = []

    def take_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take_step(len(self._losses))

    def _take_step(self, step: int) -> None:
        tokens = self._batches.take(step)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        clip_grad_norm_(self._model.parameters(), self._job.optim.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._job.optim.lr * lr_factor(self._job.optim.schedule, step, self._job.train.steps or 1)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        return [loss.item() for loss in self._losses]

    def close(self) -> None:
        del self._model, self._optimizer


class _Batches:
    """The job's batches in the job's order."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._source = open_source(job.data, "train", job.run.seed)
        self._schedule = batch_schedule(job, len(self._source))
        self._seed, self._device = job.run.seed, device

    def take(self, step: int) -> Tensor:
        (micro_batch,) = self._schedule.assigned(step, 0, 1)
        tokens: Tensor = self._source.read(micro_batch.indices(len(self._source), self._seed))["tokens"]
        if self._device.type == "cuda":
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        return tokens.long()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]

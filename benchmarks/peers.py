"""How do Accelerate and Lightning take a step? Each by the loop its documentation shows, with DDP tuned as by hand.

They come with the extra ``peers``; one that is missing is left out and named. Invariant: a peer trains what everybody
trains, and its turns hold its own steps only: set-up is outside.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from contenders import TUNED, Contender
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from workload import CLIP, StepLog, Workload, loader


class Accelerate:
    """accelerator.prepare, accelerator.backward, accelerator.clip_grad_norm_."""

    def __init__(self, workload: Workload) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        # A scheduler that is not tied to the optimizer steps once a step, not once for each process.
        self._accelerator = Accelerator(
            cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**TUNED)], step_scheduler_with_optimizer=False
        )
        model = workload.model()
        optimizer = workload.optimizer(model)
        ranks = [workload.indices(rank) for rank in range(workload.num_ranks)]
        batches = [batch for step in zip(*ranks, strict=True) for batch in step]  # it deals them out to the ranks
        self._model, self._optimizer, ready, self._scheduler = self._accelerator.prepare(
            model, optimizer, loader(workload, batches), LambdaLR(optimizer, workload.rate)
        )
        self._batches = iter(ready)
        self._workload = workload
        self._num_done = 0
        self.log_path = workload.folder / "accelerate.jsonl"
        tokens = workload.num_targets * workload.num_ranks
        self._log = StepLog(self.log_path, tokens, writes=self._accelerator.is_main_process)

    def take_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take_step()

    def _take_step(self) -> None:
        tokens = next(self._batches).long()
        loss = self._model(tokens[:, :-1], tokens[:, 1:]) / self._workload.num_targets
        self._accelerator.backward(loss)
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), CLIP)
        rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        mean = self._accelerator.reduce(loss.detach(), reduction="mean")
        self._num_done += 1
        self._log.write(self._num_done, mean.item(), norm.item(), rate)

    def close(self) -> None:
        self._log.close()


class Fabric:
    """Lightning without its trainer: fabric.setup, fabric.backward, fabric.clip_gradients."""

    def __init__(self, workload: Workload) -> None:
        from lightning.fabric import Fabric as LightningFabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment
        from lightning.fabric.strategies import DDPStrategy

        self._fabric = LightningFabric(
            accelerator="cpu",
            devices=workload.num_ranks,
            strategy=DDPStrategy(process_group_backend="gloo", **TUNED),
            plugins=[TorchElasticEnvironment()],
        )
        self._fabric.launch()
        model = workload.model()
        self._model, self._optimizer = self._fabric.setup(model, workload.optimizer(model))
        self._scheduler = LambdaLR(self._optimizer, workload.rate)
        batches = loader(workload, workload.indices(self._fabric.global_rank))
        self._batches = iter(self._fabric.setup_dataloaders(batches, use_distributed_sampler=False))
        self._workload = workload
        self._num_done = 0
        self.log_path = workload.folder / "fabric.jsonl"
        tokens = workload.num_targets * workload.num_ranks
        self._log = StepLog(self.log_path, tokens, writes=self._fabric.is_global_zero)

    def take_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take_step()

    def _take_step(self) -> None:
        tokens = next(self._batches).long()
        loss = self._model(tokens[:, :-1], tokens[:, 1:]) / self._workload.num_targets
        self._fabric.backward(loss)
        norm = self._fabric.clip_gradients(self._model, self._optimizer, max_norm=CLIP)
        rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        mean = self._fabric.all_reduce(loss.detach(), reduce_op="mean")
        self._num_done += 1
        self._log.write(self._num_done, mean.item(), norm.item(), rate)

    def close(self) -> None:
        self._log.close()


class Turns:
    """Lets a loop that is not ours run in a thread of its own, a few steps at a time.

    One of the two threads always waits for the other, so that the loop has the interpreter to itself in its turn.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        self._allowed = 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self._wait()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # whatever ends the loop must reach the thread that waits for it
            self._failure = error
        self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure is not None:
            raise self._failure

    # The benchmark's side

    def take(self, num_steps: int) -> None:
        self._allowed = num_steps
        self._go.release()
        self._wait()

    def close(self) -> None:
        self._is_closing = True
        self._go.release()
        self._thread.join()

    # The loop's side

    def at_step(self) -> bool:
        """After set-up and after every step: waits while no step is allowed; False when the loop should end."""
        if self._allowed == 0:
            self._done.release()
            self._go.acquire()
        self._allowed -= 1
        return not self._is_closing


class Lightning:
    """A LightningModule under Trainer.fit, logging by self.log to a logger of its kind."""

    def __init__(self, workload: Workload) -> None:
        from lightning_loop import make_module, make_trainer

        self.log_path = workload.folder / "lightning.jsonl"
        self._turns = Turns(lambda: None) if False else None
        module = make_module(workload)
        batches = loader(workload, workload.indices(dist.get_rank()))

        def fit() -> None:
            make_trainer(workload, self.log_path, lambda: self._at_step()).fit(module, batches)

        self._turns = Turns(fit)

    def _at_step(self) -> bool:
        return self._turns.at_step()

    def take_steps(self, num_steps: int) -> None:
        self._turns.take(num_steps)

    def close(self) -> None:
        self._turns.close()

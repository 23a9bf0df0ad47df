"""How do Accelerate and Lightning take a step? Each by the loop its documentation shows, with DDP tuned as by hand.

They come with the extra ``peers``; one that is missing is left out and named. Invariant: a peer trains what everybody
trains, and its turns hold its own steps only: set-up is outside.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from contenders import TUNED, Contender
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


def _trainer(workload: Workload) -> Contender:
    from trainer import LightningTrainer

    return LightningTrainer(workload)


PEERS: dict[str, tuple[str, Callable[[Workload], Contender]]] = {
    "accelerate": ("accelerate", Accelerate),
    "lightning": ("lightning", _trainer),
    "fabric": ("lightning", Fabric),
}
"""Contender to the package it needs and how it is built."""


def installed_peers() -> tuple[str, ...]:
    return tuple(name for name, (package, _) in PEERS.items() if find_spec(package) is not None)
